"""The steps of a put: the controller admits rows, and their cells are written to the units that it names.

    [Reserve where rows are likely to go] ─▶ [Admit to the controller; their cells are written meanwhile] ─▶
    [Write to the units that it names] ─▶ else [Withdraw], and again

The cells of a small put go to the controller, which hands them on: [Admit] is then the only call. A put that fails
because a unit is lost or full is tried again until its timeout. Meanwhile the controller notices the loss and names
another unit, or rows leave. Bad input is refused before anything is sent.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from tailrace.errors import QueueTimeout, StaleRowError, StorageFull, TailraceError, WireError
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.client.session import PASSING, Session
from tailrace.transfer.queue.client.writing import Batch, Reservations, Writing, packed_versions, write
from tailrace.transfer.queue.messages import Admit, Admitted, Withdraw, Withdrawn, pack, row_ids
from tailrace.transfer.wire.calls import Call, Operation, Step, ask, expect

SMALL_BYTES = 8 * 2**10
"""The cells of a put of at most this many bytes go to the controller."""


def put_rows(session: Session, rows: Sequence[NewRow], *, timeout: float) -> Operation[list[RowId]]:
    """See `TransferQueue.put`."""
    if not rows:
        return []
    yield from session.prepare()
    session.schema.check_new(rows)
    batch = Batch(session.codec.measure_rows(row.cells for row in rows))
    draft = _Draft(rows, batch)
    tries = session.tries(timeout)
    while True:
        reservations = Reservations(session)
        try:
            admitted = yield from _admit(session, draft, reservations, tries.left_s)
        except (StaleRowError, StorageFull) as unwritten:
            yield from tries.again(unwritten)  # the controller could not write the cells, and has withdrawn the rows
            continue
        if draft.is_small and not admitted.units:
            return row_ids(admitted.rows)
        withdraw = Call(session.controller, Withdraw(admitted.rows, draft.groups))
        error = yield from _write_new(session, admitted, draft, withdraw, reservations)
        if error is None:
            return row_ids(admitted.rows)
        yield from tries.again(error)


class _Draft:
    """New rows and the parts of the messages about them, which are computed when first needed."""

    def __init__(self, rows: Sequence[NewRow], batch: Batch) -> None:
        self._rows = rows
        self.batch = batch
        self.is_small = batch.nbytes <= SMALL_BYTES
        """Whether the controller writes the cells."""
        self.full: set[int] = set()
        """The units that had no room for the cells."""

    def learn(self, failed: Mapping[int, TailraceError]) -> None:
        """Note which of the units that `failed` had no room."""
        self.full.update(number for number, error in failed.items() if isinstance(error, StorageFull))

    @cached_property
    def groups(self) -> bytes:
        """See `Withdraw.groups`."""
        return pack(np.array([row.group_id for row in self._rows], np.int64))

    @cached_property
    def admit(self) -> Admit:
        """The request to admit the rows without waiting."""
        numbers = np.array([(row.group_id, row.group_size, row.order) for row in self._rows], np.int64)
        versions = packed_versions(row.cells for row in self._rows)
        not_before = max(0, *(row.not_before for row in self._rows))
        cells = self.batch.to_bytes() if self.is_small else None
        return Admit(pack(numbers), versions, self.batch.runs, not_before, 0.0, cells)


def _admit(session: Session, draft: _Draft, reservations: Reservations, timeout: float) -> Operation[Admitted]:
    """Have rows admitted: first without waiting and with room reserved at units, then with waiting and no reservation.

    The first try saves time: cells are written while the controller is asked. It does not wait, since reserved room is
    room that other clients may be waiting for. The second try is for rows without a reservation, and for rows that have
    to wait.
    """
    if not draft.is_small:
        yield from _reserve(session, draft, reservations)
    if reservations.numbers:
        try:
            return (yield from _admit_at_once(session, draft, reservations))
        except QueueTimeout:
            if not timeout:
                raise
    started = session.now
    admit = msgspec.structs.replace(draft.admit, wait_s=timeout, full=[*draft.full])
    admitted = yield from ask(Call(session.controller, admit, wait_s=timeout), Admitted)
    session.likely_units.learn(session.now - started, len(admitted.units))
    return admitted


def _reserve(session: Session, draft: _Draft, reservations: Reservations) -> Operation[None]:
    """Reserve room at the units where the rows are likely to go, among those whose memory is shared."""
    batch = draft.batch
    near = [
        unit
        for unit in session.directory.known
        if session.memory.is_worthwhile(unit, batch.nbytes) and unit.number not in draft.full
    ]
    likely = {unit.number: unit for unit in session.likely_units.among(near)}
    if likely:
        failed = yield from reservations.reserve(likely, dict.fromkeys(likely, batch), meanwhile=lambda: draft.admit)
        draft.learn(failed)


def _admit_at_once(session: Session, draft: _Draft, reservations: Reservations) -> Operation[Admitted]:
    """Have rows admitted without waiting, and write their cells to the reserved room meanwhile.

    Raises:
        QueueTimeout: the rows would have to wait. Reserved room is given back, as for every error.
    """
    admit = msgspec.structs.replace(draft.admit, preferred=[*reservations.numbers], full=[*draft.full])
    undo = reservations.undone()
    [outcome] = yield Step([Call(session.controller, admit)], undo, meanwhile=reservations.fill)
    try:
        admitted = expect(outcome, Admitted)
    except TailraceError:
        reservations.give_back(*reservations.numbers)
        raise
    session.likely_units.learn(0.0, len(admitted.units))
    return admitted


def _write_new(
    session: Session, admitted: Admitted, draft: _Draft, withdraw: Call, reservations: Reservations
) -> Operation[TailraceError | None]:
    """Write admitted rows. Return an error if they were withdrawn and may be tried again, None if they are in."""
    if not admitted.units:
        raise WireError("the controller has named no unit for new rows")
    writings = {unit: Writing(admitted.rows, draft.batch) for unit in admitted.units}
    failed = yield from write(session, 0, writings, otherwise=[withdraw], reservations=reservations)
    draft.learn(failed)
    # A unit that this client has lost may still be known to the controller, which would wait for its cells in vain.
    if not failed or not (yield from ask(withdraw, Withdrawn, otherwise=[withdraw])).done:
        return None
    for error in failed.values():
        if not isinstance(error, PASSING):
            raise error
    return next(iter(failed.values()))
