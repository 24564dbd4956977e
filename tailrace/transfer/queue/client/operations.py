"""The calls of the queue's contract as operations, see `calls`: both faces of the client carry out these.

    put    [Reserve where rows are likely to go] ─▶ [Admit to the controller; their cells are written meanwhile] ─▶
           [Write to the units that it names] ─▶ else [Withdraw], and again
    claim  [Claim to the controller] ─▶ [Read from the rows' units] ─▶ else [Nack], and again
    ack    [Write to the rows' units] ─▶ [Ack to the controller]

What fails because a unit is lost, or full, is tried again until the call's timeout: by then the controller has noticed
and names another unit, or rows have left. Bad input is refused before anything is sent.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from tailrace.errors import PeerLost, QueueTimeout, StaleRowError, StorageFull, TailraceError, WireError
from tailrace.transfer.queue import base
from tailrace.transfer.queue.base import NewRow, QueueStats, Row, RowId
from tailrace.transfer.queue.client.batch import Batch
from tailrace.transfer.queue.client.places import Places
from tailrace.transfer.queue.client.reading import Found, Wanted, read, said
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.client.writing import Writing, write
from tailrace.transfer.queue.messages import (
    NO_VERSION,
    Ack,
    Admit,
    Admitted,
    Advance,
    Claim,
    Claimed,
    Close,
    Counted,
    Dismiss,
    Groups,
    Lost,
    Nack,
    Renew,
    Stats,
    Withdraw,
    Withdrawn,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.rows.schema import check_limit, check_outputs, oldest_version
from tailrace.transfer.wire.calls import Call, Operation, Step, ask, expect
from tailrace.transfer.wire.messages import Accepted, Message
from tailrace.types import Value, WeightVersion

SMALL_BYTES = 8 * 2**10
"""A put of at most so many bytes goes to the controller, cells and all."""
_PASSING = (PeerLost, StaleRowError, StorageFull)
"""Errors of units that another try may not meet."""


def put(session: Session, rows: Sequence[NewRow], *, timeout: float) -> Operation[list[RowId]]:
    """See `TransferQueue.put`."""
    if not rows:
        return []
    yield from session.prepare()
    session.schema.check_new(rows)
    batch = Batch(session.codec.measure_rows(row.cells for row in rows))
    draft = _Draft(rows, batch)
    tries = session.tries(timeout)
    while True:
        places = Places(session)
        try:
            admitted = yield from _admit(session, draft, places, tries.left_s)
        except (StaleRowError, StorageFull) as unwritten:
            yield from tries.again(unwritten)  # the controller could not write the cells, and has withdrawn the rows
            continue
        if draft.is_small and not admitted.units:
            return row_ids(admitted.rows)
        withdraw = Call(session.controller, Withdraw(admitted.rows, draft.groups))
        error = yield from _write_new(session, admitted, draft, withdraw, places)
        if error is None:
            return row_ids(admitted.rows)
        yield from tries.again(error)


class _Draft:
    """New rows, and what is said of them to the controller: worked out when it is needed."""

    def __init__(self, rows: Sequence[NewRow], batch: Batch) -> None:
        self._rows = rows
        self.batch = batch
        self.is_small = batch.nbytes <= SMALL_BYTES
        """Whether the controller is to write the cells."""
        self.full: set[int] = set()
        """Units that had no room for them."""

    def learn(self, failed: Mapping[int, TailraceError]) -> None:
        """Why units have not taken the cells."""
        self.full.update(number for number, error in failed.items() if isinstance(error, StorageFull))

    @cached_property
    def groups(self) -> bytes:
        """See `Withdraw.groups`."""
        return pack(np.array([row.group_id for row in self._rows], np.int64))

    @cached_property
    def admit(self) -> Admit:
        """For one who does not wait."""
        numbers = np.array([(row.group_id, row.group_size, row.order) for row in self._rows], np.int64)
        versions = _versions(row.cells for row in self._rows)
        not_before = max(0, *(row.not_before for row in self._rows))
        cells = b"".join(self.batch.frames) if self.is_small else None
        return Admit(pack(numbers), versions, self.batch.runs, not_before, 0.0, cells)


def _admit(session: Session, draft: _Draft, places: Places, timeout: float) -> Operation[Admitted]:
    """Have rows admitted; see `_admit_at_once` for `places`."""
    batch = draft.batch
    near = [
        unit
        for unit in session.directory.known
        if session.memory.is_worthwhile(unit, batch.nbytes) and unit.number not in draft.full
    ]
    likely = {unit.number: unit for unit in session.outlook.units(near)}
    if likely:
        failed = yield from places.reserve(likely, dict.fromkeys(likely, batch), meanwhile=lambda: draft.admit)
        draft.learn(failed)
    if places.numbers:
        try:
            return (yield from _admit_at_once(session, draft, places))
        except QueueTimeout:
            if not timeout:
                raise
    started = session.now
    admit = msgspec.structs.replace(draft.admit, wait_s=timeout, full=[*draft.full])
    admitted = yield from ask(Call(session.controller, admit, wait_s=timeout), Admitted)
    session.outlook.learn(session.now - started, len(admitted.units))
    return admitted


def _admit_at_once(session: Session, draft: _Draft, places: Places) -> Operation[Admitted]:
    """Have rows admitted, and their cells written to `places` meanwhile.

    They take up room there, so nobody waits with them for more.

    Raises:
        QueueTimeout: they would have to wait; the places are given back, as for every error.
    """
    admit = msgspec.structs.replace(draft.admit, preferred=[*places.numbers], full=[*draft.full])
    undo = places.undone()
    [outcome] = yield Step([Call(session.controller, admit)], undo, meanwhile=places.fill)
    try:
        admitted = expect(outcome, Admitted)
    except TailraceError:
        places.give_back(*places.numbers)
        raise
    session.outlook.learn(0.0, len(admitted.units))
    return admitted


def _write_new(
    session: Session, admitted: Admitted, draft: _Draft, withdraw: Call, places: Places
) -> Operation[TailraceError | None]:
    """Write admitted rows. Returns the error after which they are not in the queue, but may be admitted anew."""
    if not admitted.units:
        raise WireError("the controller has named no unit for new rows")
    writings = {unit: Writing(admitted.rows, draft.batch) for unit in admitted.units}
    failed = yield from write(session, 0, writings, otherwise=[withdraw], places=places)
    draft.learn(failed)
    # one that is lost to this client may be there for the controller, which would wait for what never comes
    if not failed or not (yield from ask(withdraw, Withdrawn, otherwise=[withdraw])).done:
        return None
    for error in failed.values():
        if not isinstance(error, _PASSING):
            raise error
    return next(iter(failed.values()))


def claim(session: Session, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[base.Claim]:
    """See `TransferQueue.claim`. A lease whose cells do not come is given back."""
    yield from session.prepare()  # not after the lease, which nobody would give back were this broken off
    session.schema.task(task)
    tries = session.tries(timeout)
    while True:
        claimed = yield from lease(session, task, limit=limit, rank=rank, timeout=tries.left_s)
        give_back = Call(session.controller, Nack(claimed.lease_id, None))
        try:
            return (yield from fetch(session, task, claimed, otherwise=[give_back]))
        except TailraceError as error:
            yield Step([give_back])  # where it does not arrive, the lease ends by itself
            if not isinstance(error, _PASSING):
                raise
            yield from tries.again(error)


def lease(session: Session, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[Claimed]:
    """See `RemoteQueue.lease`."""
    check_limit(limit)
    message = Claim(task, limit, rank, timeout)
    return (yield from ask(Call(session.controller, message, wait_s=message.wait_s), Claimed))


def fetch(session: Session, task: str, claimed: Claimed, *, otherwise: Sequence[Call] = ()) -> Operation[base.Claim]:
    """See `SyncQueue.fetch`."""
    yield from session.prepare()
    rows = yield from _rows(session, claimed, otherwise)
    return base.Claim(lease_id=claimed.lease_id, lease_s=claimed.lease_s, task=task, rows=rows)


def _rows(session: Session, claimed: Claimed, otherwise: Sequence[Call]) -> Operation[tuple[Row, ...]]:
    records = unpack(claimed.rows, 4)
    count, columns = len(records), claimed.columns
    units, tags = unpack(claimed.units, max(1, claimed.width)), unpack(claimed.tags, max(1, len(columns)))
    if not len(units) == count == (len(tags) if columns else count):
        raise WireError(f"got the units of {len(units)} rows and the tags of {len(tags)}, expected those of {count}")
    cells: list[dict[str, Value]] = [{} for _ in range(count)]
    for found in (yield from _find(session, claimed, Wanted(records[:, :2], units, columns, tags), otherwise)):
        values = [
            session.codec.read_column(column, found.memories, found.places[:, place], found.lengths[:, place])
            for place, column in enumerate(columns)
        ]
        for row, own in zip(found.index.tolist(), zip(*values, strict=True), strict=True):
            cells[row] = dict(zip(columns, own, strict=True))
    return tuple(
        Row(id=RowId(slot, generation), group_id=group_id, order=order, cells=own, units=tuple(u for u in of if u >= 0))
        for (slot, generation, group_id, order), own, of in zip(records.tolist(), cells, units.tolist(), strict=True)
    )


def _find(session: Session, claimed: Claimed, wanted: Wanted, otherwise: Sequence[Call]) -> Operation[list[Found]]:
    """The cells of claimed rows: said, or read."""
    if not wanted.columns:
        return []
    if claimed.cells is None:
        return (yield from read(session, wanted, otherwise=otherwise))
    return [said(claimed.cells, wanted)]


def ack(
    session: Session, claimed: base.Claim, outputs: Mapping[RowId, Mapping[str, Value]], *, timeout: float
) -> Operation[None]:
    """See `TransferQueue.ack`. Outputs are written to every unit of their row before they count."""
    if not outputs:
        return
    yield from session.prepare()
    task = session.schema.task(claimed.task)
    for row, cells in outputs.items():
        check_outputs(task, row, cells)
    ordered = ({column: cells[column] for column in task.writes} for cells in outputs.values())
    batch = Batch(session.codec.measure_rows(ordered))
    missed: list[int] = []
    unwritten: Collection[RowId] = ()
    if task.writes:
        unwritten = outputs.keys() - {row.id for row in claimed.rows}
    if task.writes and not unwritten:
        missed = yield from _write_outputs(session, claimed, list(outputs), batch, timeout)
    versions = _versions(outputs.values())
    message = Ack(claimed.lease_id, pack(outputs), versions, batch.runs, missed, pack(unwritten))
    yield from ask(Call(session.controller, message), Accepted)
    session.acked.add(claimed.lease_id, len(outputs))


def _write_outputs(
    session: Session, claimed: base.Claim, rows: Sequence[RowId], batch: Batch, timeout: float
) -> Operation[list[int]]:
    """Write outputs to all units of their rows; the units that are lost, where each row has another one.

    Raises:
        StaleRowError: a row has no other one.
    """
    units_of = {row.id: row.units for row in claimed.rows}
    units = [units_of[row] for row in rows]
    pending = {unit: [place for place, own in enumerate(units) if unit in own] for unit in set().union(*units)}
    missed: dict[int, TailraceError] = {}
    tries = session.tries(timeout)
    while True:
        writings = {
            unit: Writing(pack(rows[place] for place in places), batch.take(places)) for unit, places in pending.items()
        }
        failed = yield from write(session, claimed.lease_id, writings)
        missed |= {unit: error for unit, error in failed.items() if isinstance(error, PeerLost)}
        full = {unit: error for unit, error in failed.items() if isinstance(error, StorageFull)}
        for unit, error in failed.items():
            if unit not in full and unit not in missed:
                raise error
        for row, own in zip(rows, units, strict=True):
            if own and missed.keys() >= set(own):
                raise StaleRowError(f"{row} cannot be written: it is lost with its units {own}") from missed[own[0]]
        if not full:
            return sorted(missed)
        pending = {unit: pending[unit] for unit in full}
        yield from tries.again(next(iter(full.values())))


def nack(session: Session, claimed: base.Claim, rows: Sequence[RowId] | None) -> Operation[None]:
    """See `TransferQueue.nack`. Nobody is told where nothing can be left."""
    if rows is None and session.acked.all_of(claimed):
        return
    yield from tell(session, Nack(claimed.lease_id, None if rows is None else pack(rows)))


def renew(session: Session, lease_id: int) -> Operation[None]:
    """See `TransferQueue.renew`."""
    yield from tell(session, Renew(lease_id))


def advance(session: Session, version: WeightVersion) -> Operation[None]:
    """See `TransferQueue.advance`."""
    yield from tell(session, Advance(version))


def dismiss(session: Session, name: str) -> Operation[None]:
    """See `RemoteQueue.dismiss`."""
    yield from tell(session, Dismiss(name))


def lost_groups(session: Session, *, timeout: float) -> Operation[list[int]]:
    """See `TransferQueue.lost_groups`."""
    groups = yield from ask(Call(session.controller, Lost(timeout), wait_s=timeout), Groups)
    return [number for [number] in unpack(groups.ids, 1).tolist()]


def stats(session: Session) -> Operation[QueueStats]:
    """See `TransferQueue.stats`."""
    return (yield from ask(Call(session.controller, Stats()), Counted)).stats


def close(session: Session) -> Operation[None]:
    """See `TransferQueue.close`."""
    yield from tell(session, Close())


def tell(session: Session, message: Message) -> Operation[None]:
    """Have the controller accept a message."""
    yield from ask(Call(session.controller, message), Accepted)


def _versions(rows: Iterable[Mapping[str, Value]]) -> bytes:
    """[n], packed, see `Admit.versions`."""
    versions = [oldest_version(cells) for cells in rows]
    return pack(np.array([NO_VERSION if version is None else version for version in versions], np.int64))
