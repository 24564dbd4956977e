"""The steps of a claim: the controller leases rows, and their cells are read from the units that hold them.

    [Claim to the controller] ─▶ [Read to every unit that is the first of some rows] ─▶
    [Read to the second unit of the rows that did not come] ─▶ … ─▶ else [Nack], and again

Small cells come with the lease. A claim that fails because a unit is lost is tried again until the claim's timeout: the
controller notices the loss meanwhile. Bad input is refused before anything is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import PeerLost, StaleRowError, TailraceError, WireError
from tailrace.transfer.queue import base
from tailrace.transfer.queue.base import Row, RowId
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.client.session import PASSING, Session
from tailrace.transfer.queue.client.shared_memory import frame_memory
from tailrace.transfer.queue.messages import NO_UNIT, Cells, Claim, Claimed, Inline, Nack, Read, Unit, pack, unpack
from tailrace.transfer.queue.rows.schema import check_limit
from tailrace.transfer.wire.calls import Call, Operation, Step, ask, expect
from tailrace.transfer.wire.frames import Reply
from tailrace.types import IntArray, Value


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The cells to read: n rows in c columns."""

    rows: IntArray
    """[n, 2]: slot, generation."""
    units: IntArray
    """[n, width], see `Claimed.units`."""
    columns: list[str]
    tags: IntArray
    """[n, c], see `Claimed.tags`."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The cells of k of the wanted rows, from one unit."""

    index: IntArray
    """[k], the places of these rows among the wanted rows."""
    lengths: IntArray
    """[k, c], see `Run.lengths`."""
    places: IntArray
    """[k, c, 2]: the index into `memories`, and the offset in bytes."""
    memories: list[memoryview]


def claim_rows(
    session: Session, task: str, *, limit: int | None, rank: int | None, timeout: float
) -> Operation[base.Claim]:
    """See `TransferQueue.claim`. A lease whose cells do not come is given back."""
    yield from session.prepare()  # before the lease: if this is cancelled, there is nothing to give back
    session.schema.task(task)
    tries = session.tries(timeout)
    while True:
        claimed = yield from lease_rows(session, task, limit=limit, rank=rank, timeout=tries.left_s)
        try:
            return (yield from fetch_or_give_back(session, task, claimed))
        except PASSING as error:
            yield from tries.again(error)


def lease_rows(
    session: Session, task: str, *, limit: int | None, rank: int | None, timeout: float
) -> Operation[Claimed]:
    """See `RemoteQueue.lease`."""
    check_limit(limit)
    message = Claim(task, limit, rank, timeout)
    return (yield from ask(Call(session.controller, message, wait_s=message.wait_s), Claimed))


def fetch_or_give_back(
    session: Session, task: str, claimed: Claimed, *, otherwise: Sequence[Call] = ()
) -> Operation[base.Claim]:
    """Fetch the cells of leased rows. If they do not come, give the rows back."""
    give_back = Call(session.controller, Nack(claimed.lease_id, None))
    try:
        return (yield from fetch_rows(session, task, claimed, otherwise=[give_back, *otherwise]))
    except TailraceError:
        yield Step([give_back], otherwise)  # if this does not arrive, the lease expires by itself
        raise


def fetch_rows(
    session: Session, task: str, claimed: Claimed, *, otherwise: Sequence[Call] = ()
) -> Operation[base.Claim]:
    """See `SyncQueue.fetch`."""
    yield from session.prepare(otherwise=otherwise)
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
    """Return the cells of claimed rows: those that came with the lease, or else read from units."""
    if not wanted.columns:
        return []
    if claimed.cells is None:
        return (yield from read(session, wanted, otherwise=otherwise))
    return [said(claimed.cells, wanted)]


def read(session: Session, wanted: Wanted, *, otherwise: Sequence[Call] = ()) -> Operation[list[Found]]:
    """Read every wanted cell from the units.

    Raises:
        PeerLost, StaleRowError: a row did not come from any of its units.
        WireError: an answer does not match the request.
    """
    found: list[Found] = []
    left = np.arange(len(wanted.rows))
    error: TailraceError = WireError("the controller has named no unit for a row")
    for units in wanted.units.T:
        numbers = units[left]
        asked = {number: left[numbers == number] for number in np.unique(numbers).tolist() if number != NO_UNIT}
        known = yield from session.directory.units(asked, otherwise=otherwise)
        reached = {number: unit for number, unit in known.items() if isinstance(unit, Unit)}
        calls = [_read_call(session, wanted, asked[number], unit) for number, unit in reached.items()]
        outcomes = yield Step(calls, otherwise)
        failures = {number: unit for number, unit in known.items() if isinstance(unit, TailraceError)}
        lost = [left[numbers == NO_UNIT]]
        refusals: list[TailraceError] = []
        for number, outcome in (failures | dict(zip(reached, outcomes, strict=True))).items():
            try:
                if isinstance(outcome, TailraceError):
                    raise outcome
                found.append(_open(session, wanted, asked[number], reached[number], outcome))
            except (PeerLost, StaleRowError) as failure:
                error = failure
                lost.append(asked[number])
                session.directory.forget(number)
            except TailraceError as failure:
                refusals.append(failure)  # raised once every answer is opened: else their pins would never be released
        if refusals:
            raise refusals[0]
        left = np.concatenate(lost)
        if not left.size:
            return found
    raise error


def said(cells: Inline, wanted: Wanted) -> Found:
    """Return the wanted cells from those that came with the lease.

    Raises:
        WireError: the cells do not match the request.
    """
    starts = unpack(cells.starts, 1)
    places = np.column_stack([np.zeros_like(starts), starts])  # all cells lie in one memory
    return _found(wanted, np.arange(len(wanted.rows)), cells.lengths, places, [frame_memory(cells.data)])


def _read_call(session: Session, wanted: Wanted, index: IntArray, unit: Unit) -> Call:
    rows, tags = pack(wanted.rows[index]), pack(wanted.tags[index])
    return Call(endpoint(unit), Read(rows, wanted.columns, tags, session.memory.is_shared(unit)))


def _open(session: Session, wanted: Wanted, index: IntArray, unit: Unit, reply: Reply) -> Found:
    cells = expect(reply, Cells)
    memories = session.memory.open(unit, cells, reply.frames)
    return _found(wanted, index, cells.lengths, unpack(cells.places, 2), memories)


def _found(wanted: Wanted, index: IntArray, packed: bytes, places: IntArray, memories: list[memoryview]) -> Found:
    """Build a `Found` from packed lengths [k, c] and places [k * c, 2].

    Raises:
        WireError: the arrays do not have these shapes.
    """
    shape, lengths = (len(index), len(wanted.columns)), unpack(packed, 1)
    if not len(lengths) == len(places) == shape[0] * shape[1]:
        raise WireError(f"got {len(lengths)} cells in {len(places)} places, asked for {shape[0]} x {shape[1]}")
    return Found(index, lengths.reshape(shape), places.reshape(*shape, 2), memories)
