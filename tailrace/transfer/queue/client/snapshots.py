"""A queue's state and cells as bytes, and back.

snapshot  [Export] ─▶ [Read some rows] ─▶ … ─▶ [Release] ─▶ bytes        the queue goes on meanwhile
restore   bytes ─▶ [Restore] ─▶ [Write some rows to every unit] ─▶ …     each row as one part
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from tailrace.errors import PeerLost, StaleRowError, TailraceError, WireError, on_failure
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import Parts
from tailrace.transfer.queue.client.claim import Found, Wanted, read
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.client.writing import Batch, Writing, write
from tailrace.transfer.queue.messages import (
    NO_UNIT,
    Admitted,
    Export,
    Exported,
    Release,
    Restore,
    Withdraw,
    Withdrawn,
    pack,
    row_ids,
)
from tailrace.transfer.queue.rows.state import ControlState, RowRecord
from tailrace.transfer.queue.snapshot import decode_snapshot, encode_snapshot
from tailrace.transfer.wire.calls import Call, Operation, Step, ask

_PIECE_BYTES = 64 * 2**20
"""The bytes of cells that are read or written at once."""


def snapshot(session: Session, *, timeout: float) -> Operation[bytes]:
    """See `TransferQueue.snapshot`. If a unit is lost meanwhile, it is tried again within `timeout` seconds."""
    state, parts = yield from read_all(session, timeout=timeout)
    return encode_snapshot(session.schema.tasks, session.columns, state, parts)


def read_all(session: Session, *, timeout: float) -> Operation[tuple[ControlState, dict[RowId, bytes]]]:
    """Return the state of the controller, and one part for each row, with all of its cells."""
    yield from session.prepare()
    tries = session.tries(timeout)
    while True:
        try:
            return (yield from _read_all(session))
        except (PeerLost, StaleRowError) as error:
            yield from tries.again(error)


def _read_all(session: Session) -> Operation[tuple[ControlState, dict[RowId, bytes]]]:
    exported = yield from ask(Call(session.controller, Export()), Exported)
    release = Call(session.controller, Release(exported.hold))
    parts: dict[RowId, bytes] = {}
    with on_failure(session.later.append, release):
        for piece in _pieces(session, exported.state.rows):
            wanted = _wanted(session, piece)
            for found in (yield from read(session, wanted)) if wanted.columns else ():
                parts |= _joined(session, [piece[place] for place in found.index.tolist()], wanted.columns, found)
    yield Step([release], [release])  # until then no row that leaves is dropped; a controller that dies loses its hold
    for row in exported.state.rows:
        parts.setdefault(row.id, b"")  # a row without cells
    return exported.state, parts


def restore(session: Session, data: bytes) -> Operation[None]:
    """See `TransferQueue.restore`. If it fails, the queue is empty again.

    Raises:
        PeerLost: this client did not reach a unit that the controller counts as alive.
    """
    yield from session.prepare()
    state, parts = decode_snapshot(data, session.schema.tasks, session.columns)
    yield from write_all(session, state, parts)


def write_all(session: Session, state: ControlState, parts: dict[RowId, bytes]) -> Operation[None]:
    """Fill the controller and its units from a state. `parts`: one for each row. Errors: see `restore`."""
    admitted = yield from ask(Call(session.controller, Restore(state)), Admitted)
    groups = pack(np.array([row.group_id for row in state.rows], np.int64))
    withdraw = Call(session.controller, Withdraw(admitted.rows, groups))
    try:
        lost = yield from _write_all(session, state, parts, admitted, withdraw)
    except TailraceError:
        yield Step([withdraw])
        raise
    # A unit that this client has lost may still be known to the controller, which would wait for its cells in vain.
    if lost is not None and (yield from ask(withdraw, Withdrawn, otherwise=[withdraw])).done:
        raise lost


def _write_all(
    session: Session, state: ControlState, parts: dict[RowId, bytes], admitted: Admitted, withdraw: Call
) -> Operation[PeerLost | None]:
    """Write every row to every unit. Return the error of a unit that was not reached while others were, or None."""
    if row_ids(admitted.rows) != [row.id for row in state.rows]:
        raise WireError("the controller has admitted other rows than those that are restored")
    units = list(admitted.units)
    lost: PeerLost | None = None
    for piece in _pieces(session, state.rows):
        batch = Batch([_stored(piece, [parts[row.id] for row in piece])])
        rows = pack(row.id for row in piece)
        failed = yield from write(session, 0, {unit: Writing(rows, batch) for unit in units}, otherwise=[withdraw])
        units = [unit for unit in units if unit not in failed]
        for error in failed.values():
            if not isinstance(error, PeerLost) or not units:
                raise error
            lost = error
    return lost


def _stored(rows: Sequence[RowRecord], parts: Sequence[bytes]) -> Parts:
    """Return the parts of rows with cells in the same columns, each in one piece."""
    lengths = np.array([list(row.facts.lengths.values()) for row in rows], np.int64)
    sizes = list(map(len, parts))
    return Parts(tuple(rows[0].facts.lengths), lengths, sizes, sum(sizes), [(part,) for part in parts])


def _pieces(session: Session, rows: Sequence[RowRecord]) -> Iterator[list[RowRecord]]:
    """Split rows into pieces: cells in the same columns, and at most `_PIECE_BYTES` except for a single row."""
    alike: dict[tuple[str, ...], list[RowRecord]] = {}
    for row in rows:
        alike.setdefault(tuple(row.facts.lengths), []).append(row)
    for group in alike.values():
        piece: list[RowRecord] = []
        nbytes = 0
        for row in group:
            size = session.codec.layout(row.facts.lengths).nbytes
            if piece and nbytes + size > _PIECE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append(row)
            nbytes += size
        yield piece


def _wanted(session: Session, piece: Sequence[RowRecord]) -> Wanted:
    writers = {column: place for place, task in enumerate(session.schema.tasks) for column in task.writes}
    columns = list(piece[0].facts.lengths)
    tags = [[row.consumed[writers[column]] if column in writers else 0 for column in columns] for row in piece]
    units = list(zip_longest(*(row.units for row in piece), fillvalue=NO_UNIT))
    return Wanted(
        np.array([row.id for row in piece], np.int64),
        np.array(units, np.int64).T,
        columns,
        np.array(tags, np.int64),
    )


def _joined(session: Session, rows: Sequence[RowRecord], columns: Sequence[str], found: Found) -> dict[RowId, bytes]:
    """Return the bytes of each row's part, joined from its cells."""
    if [list(row.facts.lengths.values()) for row in rows] != found.lengths.tolist():
        raise WireError("a unit has cells of other lengths than the controller knows of")
    cells = [
        session.codec.find_column(column, found.memories, found.places[:, place], found.lengths[:, place])
        for place, column in enumerate(columns)
    ]
    return {
        row.id: b"".join(piece for cell in own for piece in (cell, bytes(-len(cell) & 7)))
        for row, own in zip(rows, zip(*cells, strict=True), strict=True)
    }
