"""Rows on their way into a queue: from their admission to the last Written.

admitted ──Written by every unit──▶ confirmed: the journal has it ──▶ entered
    └── Withdraw, client dead, too late, all units dead ──▶ undone
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tailrace.errors import QueueError, StaleRowError, TailraceError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller import journal as log
from tailrace.transfer.queue.controller.context import Context
from tailrace.transfer.queue.controller.waiting import Timer
from tailrace.transfer.queue.messages import ROW_ID_BYTES, Admitted, pack, row_ids
from tailrace.transfer.queue.policies.base import CellFacts
from tailrace.transfer.queue.rows.state import ControlState, RowHeader
from tailrace.transfer.wire.messages import Failure
from tailrace.transfer.wire.server import Ticket
from tailrace.types import WeightVersion


class Admission(ABC):
    """Rows that were admitted and are being written. They are confirmed and enter, or are undone."""

    def __init__(self, client: str, ids: list[RowId], packed: bytes, units: Sequence[int]) -> None:
        """`client`: who writes them. `packed`: the ids, [n, 2]. `units`: each gets all of them."""
        self.client = client
        self.ids = ids
        self.packed = packed
        self.missing = {unit: set(ids) for unit in units}
        """By unit: rows that it has not got yet. A unit that dies leaves it."""
        self.timer: Timer | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every unit has all rows."""
        return not any(self.missing.values())

    @abstractmethod
    def confirm(self) -> None:
        """Every unit has them: write it into the journal. Whoever brought the rows may then go on while they enter."""

    @abstractmethod
    def enter(self) -> None:
        """Tasks may have them."""

    @abstractmethod
    def undo(self) -> None:
        """They will not be written."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What a producer wants to put."""

    rows: list[RowHeader]
    facts: list[CellFacts]
    """What is known of the cells of each row."""
    sizes: list[int]
    """Bytes of each row."""
    nbytes: int
    """The bytes of all rows."""
    not_before: WeightVersion
    """See `NewRow.not_before`: the newest among them."""


@dataclass(slots=True, eq=False)
class SmallPut:
    """A put whose cells came along with its Admit, and which is answered when the controller has written them."""

    ticket: Ticket
    cells: bytes
    error: TailraceError | None = None
    """Why a unit has refused them."""


class PutAdmission(Admission):
    """New rows."""

    def __init__(
        self, context: Context, record: log.PutAdmitted, offer: Offer, ids: list[RowId], small: SmallPut | None
    ) -> None:
        super().__init__(record.client, ids, record.rows, record.units)
        self._context = context
        self.record = record
        """What the journal says of it."""
        self._offer = offer
        self.small = small
        context.accounts.add(ids, offer.sizes, record.units)

    def confirm(self) -> None:
        """See `Admission.confirm`."""
        self._context.journal.append(log.RowsEntered(self.packed, list(self.missing)))
        if self.small is not None:
            self._context.server.reply(self.small.ticket, Admitted(self.packed, []))

    def enter(self) -> None:
        """See `Admission.enter`."""
        context, offer = self._context, self._offer
        if self.small is not None:
            context.cells.add(self.ids, offer.facts, offer.sizes, self.small.cells)
        units = tuple(self.missing)
        left = context.control.enter(self.ids, offer.rows, offer.facts, units=units)
        if left:
            context.accounts.leave(dict.fromkeys(left, units))

    def undo(self) -> None:
        """See `Admission.undo`."""
        context = self._context
        context.journal.append(log.PutWithdrawn(self.packed))
        context.control.withdraw(self.ids, self._offer.rows)
        context.accounts.leave(dict.fromkeys(self.ids, self.record.units))
        if self.small is not None:
            error = self.small.error or StaleRowError("the units that were to have the rows are gone")
            context.server.reply(self.small.ticket, Failure.of(error))


class RestoreAdmission(Admission):
    """The rows of a snapshot, for an empty queue. Each is written as one part, under tag 0."""

    def __init__(self, context: Context, client: str, state: ControlState, units: Sequence[int]) -> None:
        ids = [record.id for record in state.rows]
        super().__init__(client, ids, pack(ids), units)
        self._context = context
        self._state = state
        self._units = units
        sizes = [context.codec.layout(record.facts.lengths).nbytes for record in state.rows]
        context.accounts.add(ids, sizes, units)

    def confirm(self) -> None:
        """See `Admission.confirm`."""
        units = tuple(self.missing)
        rows = [
            msgspec.structs.replace(record, consumed=dict.fromkeys(record.consumed, 0), units=units)
            for record in self._state.rows
        ]
        self._state = msgspec.structs.replace(self._state, rows=rows)
        self._context.journal.append(log.Restored(self._state))

    def enter(self) -> None:
        """See `Admission.enter`."""
        self._context.control.restore(self._state)

    def undo(self) -> None:
        """See `Admission.undo`: it may be tried again, with the same ids."""
        self._context.accounts.withdraw(self.ids, self._units)


class Admissions:
    """The admissions under way, by row."""

    def __init__(self) -> None:
        self._by_row: dict[RowId, Admission] = {}

    def __contains__(self, row: RowId) -> bool:
        """Whether a row is on its way."""
        return row in self._by_row

    def __iter__(self) -> Iterator[Admission]:
        """All of them; the loop may add and remove some."""
        return iter({id(admission): admission for admission in self._by_row.values()}.values())

    def add(self, admission: Admission, timer: Timer) -> None:
        """Rows are on their way, until `timer` ends it."""
        admission.timer = timer
        for row in admission.ids:
            self._by_row[row] = admission

    def remove(self, admission: Admission) -> None:
        """They have come, or will not."""
        if admission.timer is not None:
            admission.timer.cancel()
        for row in admission.ids:
            del self._by_row[row]

    def is_under_way(self, admission: Admission) -> bool:
        """Whether it was not removed yet."""
        return self._by_row.get(admission.ids[0]) is admission

    def all_of(self, rows: Sequence[RowId]) -> Admission | None:
        """The admission of these rows; None where it is over.

        Raises:
            QueueError: these are not all rows of it.
        """
        admission = self._by_row.get(rows[0]) if rows else None
        if admission is not None and admission.ids != list(rows):
            raise QueueError(f"{len(rows)} rows from {rows[0]} on are not all of those that were admitted together")
        return admission

    def written(self, unit: int, rows: Sequence[RowId]) -> tuple[list[Admission], list[RowId]]:
        """A unit has these rows. Returns admissions that are whole now, and rows that are not on their way to it."""
        strange: list[RowId] = []
        touched: dict[int, Admission] = {}
        for row in rows:
            admission = self._by_row.get(row)
            if admission is None or unit not in admission.missing:
                strange.append(row)
            else:
                admission.missing[unit].discard(row)
                touched[id(admission)] = admission
        return [admission for admission in touched.values() if admission.is_whole], strange

    def written_packed(self, unit: int, packed: bytes) -> tuple[list[Admission], list[RowId]]:
        """`written` of rows that are packed as [n, 2]: mostly all rows of one admission."""
        first = row_ids(packed[:ROW_ID_BYTES])
        admission = self._by_row.get(first[0]) if first else None
        if admission is None or admission.packed != packed or unit not in admission.missing:
            return self.written(unit, row_ids(packed))
        admission.missing[unit].clear()
        return [admission] if admission.is_whole else [], []

    def of_unit(self, unit: int) -> list[RowId]:
        """Rows that are on their way to a unit."""
        return [row for admission in self for row in admission.ids if unit in admission.missing]
