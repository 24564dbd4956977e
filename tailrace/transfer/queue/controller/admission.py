"""New rows on their way into a queue: from Admit to the last Written.

    Admit ──version there?──▶ line ──room, units──▶ reserved ──Written by every unit──▶ entered
                                                       └── Withdraw, client dead, too late, all units dead ──▶ withdrawn

Groups that were lost wait for nothing: the room that they take was theirs before.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller.journal import Reserved
from tailrace.transfer.queue.controller.timers import Timer
from tailrace.transfer.queue.messages import ROW_ID_BYTES, row_ids
from tailrace.transfer.queue.rows.state import RowHeader
from tailrace.types import WeightVersion

Heard: TypeAlias = Callable[[], None]
"""Called when the journal says that rows have come: whoever brought them may go on while they enter."""
Done: TypeAlias = Callable[[Sequence[int], Heard], None]


def nobody() -> None:
    """Nobody waits to hear of it."""


@dataclass(slots=True, eq=False)
class Admission:
    """Rows that were admitted and are being written."""

    client: str
    ids: list[RowId]
    packed: bytes
    """The ids, [n, 2]."""
    missing: dict[int, set[RowId]]
    """By unit: rows that it has not got yet."""
    done: Done
    """All rows are written: on which units."""
    undone: Callable[[], None]
    """They will not be."""
    timer: Timer
    record: Reserved | None
    """What the journal says of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What a producer wants to put."""

    rows: list[RowHeader]
    not_before: WeightVersion
    """See `NewRow.not_before`: the newest among them."""
    sizes: list[int]
    """Bytes of each row."""
    nbytes: int
    """Of all rows."""


class Admissions:
    """Those under way, by row."""

    def __init__(self) -> None:
        self._by_row: dict[RowId, Admission] = {}

    def __contains__(self, row: RowId) -> bool:
        """Whether a row is on its way."""
        return row in self._by_row

    def add(self, admission: Admission) -> None:
        """Rows are on their way."""
        self._by_row.update(dict.fromkeys(admission.ids, admission))

    def written_whole(self, unit: int, packed: bytes, heard: Heard) -> bool:
        """A unit has these rows, packed as [n, 2]; whether they were just what it is to have of one admission."""
        first = row_ids(packed[:ROW_ID_BYTES])
        admission = self._by_row.get(first[0]) if first else None
        if admission is None or admission.packed != packed or unit not in admission.missing:
            return False
        admission.missing[unit].clear()
        self._finish_if_whole(admission, heard)
        return True

    def written(self, unit: int, rows: Sequence[RowId], heard: Heard) -> list[RowId]:
        """A unit has these rows. Returns those that are not on their way to it."""
        strange: list[RowId] = []
        touched: dict[int, Admission] = {}
        for row in rows:
            admission = self._by_row.get(row)
            if admission is None or unit not in admission.missing:
                strange.append(row)
            else:
                admission.missing[unit].discard(row)
                touched[id(admission)] = admission
        for admission in touched.values():
            self._finish_if_whole(admission, heard)
        return strange

    def withdraw(self, rows: Sequence[RowId]) -> None:
        """Their admission is over; harmless where it was already.

        Raises:
            QueueError: these are not all rows of it.
        """
        admission = self._by_row.get(rows[0]) if rows else None
        if admission is None:
            return
        if admission.ids != list(rows):
            raise QueueError(f"{len(rows)} rows from {rows[0]} on are not all of those that were admitted together")
        self._undo(admission)

    def lose_unit(self, unit: int) -> None:
        """A unit is gone; what no other unit gets is withdrawn."""
        for admission in self._all():
            if admission.missing.pop(unit, None) is None:
                continue
            if admission.missing:
                self._finish_if_whole(admission, nobody)
            else:
                self._undo(admission)

    def lose_client(self, client: str) -> None:
        """A producer is dead."""
        for admission in self._all():
            if admission.client == client:
                self._undo(admission)

    def expire(self, admission: Admission) -> None:
        """It took too long."""
        if admission.ids[0] in self._by_row:
            self._undo(admission)

    def of_unit(self, unit: int) -> list[RowId]:
        """Rows that are on their way to a unit."""
        return [row for admission in self._all() if unit in admission.missing for row in admission.ids]

    def records(self) -> list[Reserved]:
        """What the journal says of all of them."""
        return [admission.record for admission in self._all() if admission.record is not None]

    def _all(self) -> Collection[Admission]:
        return list({id(admission): admission for admission in self._by_row.values()}.values())

    def _finish_if_whole(self, admission: Admission, heard: Heard) -> None:
        if not any(admission.missing.values()):
            self._forget(admission)
            admission.done(list(admission.missing), heard)

    def _undo(self, admission: Admission) -> None:
        self._forget(admission)
        admission.undone()

    def _forget(self, admission: Admission) -> None:
        admission.timer.cancel()
        for row in admission.ids:
            del self._by_row[row]
