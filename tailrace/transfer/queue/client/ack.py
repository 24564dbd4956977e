"""The steps of an ack: outputs are written to the units of their rows, and then the controller makes them count.

    [Write to the rows' units] ─▶ [Ack to the controller]

Outputs that find no room are written again until the ack's timeout. A nack or a renewal of a lease is one call to the
controller. Bad input is refused before anything is sent.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np

from tailrace.errors import ColumnError, LeaseError, PeerLost, StaleRowError, StorageFull, TailraceError
from tailrace.transfer.queue import base
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.client.writing import Batch, Writing, packed_versions, write
from tailrace.transfer.queue.messages import Ack, Groups, Nack, Remake, Renew, pack, unpack
from tailrace.transfer.queue.rows.schema import check_outputs
from tailrace.transfer.wire.calls import Call, Operation, ask
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import Value


def ack_rows(
    session: Session, claimed: base.Claim, outputs: Mapping[RowId, Mapping[str, Value]], *, timeout: float
) -> Operation[None]:
    """See `TransferQueue.ack`. Outputs are written to every unit of their row before they count."""
    if not outputs:
        return
    yield from session.prepare()
    batch = checked_outputs(session, claimed.task, outputs)
    missed: list[int] = []
    if session.schema.task(claimed.task).writes:
        if foreign := sorted(outputs.keys() - {row.id for row in claimed.rows}):
            yield from _refuse(session, claimed, foreign)
        missed = yield from _write_outputs(session, claimed, list(outputs), batch, timeout)
    versions = packed_versions(outputs.values())
    message = Ack(claimed.lease_id, pack(outputs), versions, batch.runs, missed)
    yield from ask(Call(session.controller, message), Accepted)
    session.acked.add(claimed.lease_id, len(outputs))


def checked_outputs(session: Session, task_name: str, outputs: Mapping[RowId, Mapping[str, Value]]) -> Batch:
    """Return the cells that a task writes to its rows.

    Raises:
        ColumnError: a row lacks a column, or a cell is not of its column's kind.
    """
    task = session.schema.task(task_name)
    for row, cells in outputs.items():
        check_outputs(task, row, cells)
    return Batch(
        session.codec.measure_rows({column: cells[column] for column in task.writes} for cells in outputs.values())
    )


def _refuse(session: Session, claimed: base.Claim, rows: Sequence[RowId]) -> Operation[None]:
    """Refuse outputs for rows outside the claim: their units are not known.

    Raises:
        StaleRowError, LeaseError: always. The controller says whether the rows are gone or leased to another client.
    """
    without_outputs = Ack(claimed.lease_id, pack(rows), packed_versions({} for _ in rows), [], [])
    with suppress(ColumnError):  # the rows are under the lease after all
        yield from ask(Call(session.controller, without_outputs), Accepted)
    raise LeaseError(f"{rows[0]} is acked with a claim that it is not in: its outputs are not written")


def _write_outputs(
    session: Session, claimed: base.Claim, rows: Sequence[RowId], batch: Batch, timeout: float
) -> Operation[list[int]]:
    """Write outputs to all units of their rows. Return the numbers of the units that were lost meanwhile.

    Raises:
        StaleRowError: all units of a row were lost.
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


def nack_rows(session: Session, claimed: base.Claim, rows: Sequence[RowId] | None) -> Operation[None]:
    """See `TransferQueue.nack`. Nothing is sent when this client has acked every row of the claim."""
    if rows is None and session.acked.all_of(claimed):
        return
    yield from session.tell(Nack(claimed.lease_id, None if rows is None else pack(rows)))


def remake_groups(session: Session, claimed: base.Claim, groups: Collection[int], most: int) -> Operation[list[int]]:
    """See `TransferQueue.remake`."""
    packed = pack(np.array(list(groups), dtype=np.int64))
    taken = yield from ask(Call(session.controller, Remake(claimed.lease_id, packed, most)), Groups)
    ids = [number for number, _ in unpack(taken.ids, 2).tolist()]
    session.acked.add(claimed.lease_id, sum(row.group_id in ids for row in claimed.rows))
    return ids


def renew_lease(session: Session, lease_id: int) -> Operation[None]:
    """See `TransferQueue.renew`."""
    yield from session.tell(Renew(lease_id))
