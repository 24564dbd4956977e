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
    """Admitted rows that are being written. The admission is confirmed and its rows enter, or it is undone."""

    def __init__(self, client: str, ids: list[RowId], packed: bytes, units: Sequence[int]) -> None:
        """`client` writes the rows. `packed`: the ids, [n, 2]. `units`: each of them gets all rows."""
        self.client = client
        self.ids = ids
        self.packed = packed
        self.missing = {unit: set(ids) for unit in units}
        """The rows that each unit has not got yet, by unit. A unit that dies is removed."""
        self.timer: Timer | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every unit has all rows."""
        return not any(self.missing.values())

    @abstractmethod
    def confirm(self) -> None:
        """Record in the journal that every unit has the rows. After that the producer may go on while they enter."""

    @abstractmethod
    def enter(self) -> None:
        """Add the rows to the control plane: from now on tasks may claim them."""

    @abstractmethod
    def undo(self) -> None:
        """Take the admission back: the rows will not be written."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """The rows that a producer wants to put."""

    rows: list[RowHeader]
    facts: list[CellFacts]
    """The facts about the cells of each row."""
    sizes: list[int]
    """Bytes of each row."""
    nbytes: int
    """The bytes of all rows."""
    not_before: WeightVersion
    """The newest `NewRow.not_before` of the rows."""


@dataclass(slots=True, eq=False)
class SmallPut:
    """A put whose cells came with its Admit. It is answered when the controller has written them."""

    ticket: Ticket
    cells: bytes
    error: TailraceError | None = None
    """The error with which a unit refused the cells."""


class PutAdmission(Admission):
    """The admission of new rows by a put."""

    def __init__(
        self, context: Context, record: log.PutAdmitted, offer: Offer, ids: list[RowId], small: SmallPut | None
    ) -> None:
        super().__init__(record.client, ids, record.rows, record.units)
        self._context = context
        self.record = record
        """The admission's record in the journal."""
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
        context.copies.note_new(self.ids, units)

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
    """The admission of a snapshot's rows to an empty queue. Each row is written as one part, under tag 0."""

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
        self._context.copies.look()

    def undo(self) -> None:
        """See `Admission.undo`. The snapshot may be restored later, with the same ids."""
        self._context.accounts.withdraw(self.ids, self._units)


class Admissions:
    """The admissions under way, by row."""

    def __init__(self) -> None:
        self._by_row: dict[RowId, Admission] = {}

    def __contains__(self, row: RowId) -> bool:
        """Whether a row was admitted and is still being written."""
        return row in self._by_row

    def __iter__(self) -> Iterator[Admission]:
        """Iterate over all admissions; the loop may add and remove some."""
        return iter({id(admission): admission for admission in self._by_row.values()}.values())

    def add(self, admission: Admission, timer: Timer) -> None:
        """Add an admission; `timer` ends it."""
        admission.timer = timer
        for row in admission.ids:
            self._by_row[row] = admission

    def remove(self, admission: Admission) -> None:
        """Remove an admission that is over: its rows are written, or will not be."""
        if admission.timer is not None:
            admission.timer.cancel()
        for row in admission.ids:
            del self._by_row[row]

    def all_of(self, rows: Sequence[RowId]) -> Admission | None:
        """The admission that has exactly these rows; None where it is over.

        Raises:
            QueueError: the admission has other rows too.
        """
        admission = self._by_row.get(rows[0]) if rows else None
        if admission is not None and admission.ids != list(rows):
            raise QueueError(f"{len(rows)} rows from {rows[0]} on are not all of those that were admitted together")
        return admission

    def written(self, unit: int, rows: Sequence[RowId]) -> tuple[list[Admission], list[RowId]]:
        """Note that `unit` has `rows`. Return admissions that are whole now, and rows that were not on their way."""
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
        """`written` for rows packed as [n, 2]; quick where they are all rows of one admission, as they mostly are."""
        first = row_ids(packed[:ROW_ID_BYTES])
        admission = self._by_row.get(first[0]) if first else None
        if admission is None or admission.packed != packed or unit not in admission.missing:
            return self.written(unit, row_ids(packed))
        admission.missing[unit].clear()
        return [admission] if admission.is_whole else [], []

    def of_unit(self, unit: int) -> list[RowId]:
        """The rows of all admissions in which `unit` takes part."""
        return [row for admission in self for row in admission.ids if unit in admission.missing]
