"""Snapshots of a queue: msgpack with the table and a versioned header; cells as the data plane keeps them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tailrace.errors import ColumnError, QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.control_plane import ControlState, RowRecord
from tailrace.transfer.queue.data_plane import Cells, DataPlane
from tailrace.transfer.queue.table import QueueTask
from tailrace.types import ColumnKind

_FORMAT = "tailrace transfer queue"
_VERSION = 2


class _Header(msgspec.Struct):
    format: str
    version: int


class _TaskRecord(msgspec.Struct):
    name: str
    reads: list[str]
    writes: list[str]
    consumed: int
    expired: int


class _RowRecord(msgspec.Struct, array_like=True):
    slot: int
    generation: int
    group_id: int
    order: int
    consumed: list[int]
    """Places in `tasks`."""
    lengths: dict[str, int]
    """By column, in the order of the cells in `data`."""
    data: bytes
    """A part with all cells of the row."""


class _Snapshot(_Header):
    tasks: list[_TaskRecord]
    columns: dict[str, ColumnKind]
    generations: list[int]
    next_lease: int
    rows: list[_RowRecord]


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a snapshot holds, validated."""

    control: ControlState
    cells: dict[RowId, Cells]


def encode_snapshot(
    tasks: Sequence[QueueTask], columns: Mapping[str, ColumnKind], control: ControlState, data: DataPlane
) -> bytes:
    """The bytes that `decode_snapshot` reads."""
    records = [
        _TaskRecord(task.spec.name, list(task.spec.reads), list(task.spec.writes), consumed, expired)
        for task, consumed, expired in zip(tasks, control.consumed, control.expired, strict=True)
    ]
    rows = [_row_record(row, data.stored(row.id)) for row in control.rows]
    return msgspec.msgpack.encode(
        _Snapshot(_FORMAT, _VERSION, records, dict(columns), control.generations, control.next_lease, rows)
    )


def _row_record(row: RowRecord, cells: Cells) -> _RowRecord:
    return _RowRecord(*row.id, row.group_id, row.order, list(row.consumed), cells.lengths, cells.data)


def decode_snapshot(
    snapshot: bytes, tasks: Sequence[QueueTask], columns: Mapping[str, ColumnKind], data: DataPlane
) -> QueueState:
    """Validate a snapshot for a queue of `tasks` and `columns`; `data` checks the cells and is not changed.

    Raises:
        QueueError: it is corrupt, of another version or another table, or not a snapshot.
    """
    record = _parse(snapshot)
    _check_table(record, tasks, columns)
    ids = [RowId(row.slot, row.generation) for row in record.rows]
    cells = dict(zip(ids, _adopt(record.rows, data), strict=True))
    rows = [
        RowRecord(
            id=row_id,
            group_id=row.group_id,
            order=row.order,
            consumed=tuple(row.consumed),
            facts=cells[row_id],
        )
        for row_id, row in zip(ids, record.rows, strict=True)
    ]
    control = ControlState(
        generations=record.generations,
        next_lease=record.next_lease,
        rows=rows,
        consumed=[task.consumed for task in record.tasks],
        expired=[task.expired for task in record.tasks],
    )
    return QueueState(control, cells)


def _parse(snapshot: bytes) -> _Snapshot:
    try:
        header = msgspec.msgpack.decode(snapshot, type=_Header)
        if (header.format, header.version) != (_FORMAT, _VERSION):
            raise QueueError(
                f"the snapshot is {header.format!r} version {header.version}; expected {_FORMAT!r} version {_VERSION}"
            )
        return msgspec.msgpack.decode(snapshot, type=_Snapshot)
    except msgspec.MsgspecError as error:
        raise QueueError(f"these {len(snapshot)} bytes are not a snapshot of a transfer queue: {error}") from None


def _check_table(record: _Snapshot, tasks: Sequence[QueueTask], columns: Mapping[str, ColumnKind]) -> None:
    theirs = [(task.name, task.reads, task.writes) for task in record.tasks]
    ours = [(task.spec.name, list(task.spec.reads), list(task.spec.writes)) for task in tasks]
    if theirs != ours:
        raise QueueError(f"the snapshot is of another table: it has {theirs}, this queue has {ours}")
    for column, kind in record.columns.items():
        if columns.get(column) is not kind:
            raise QueueError(f"column {column!r} of the snapshot holds {kind}; in this queue: {columns.get(column)}")


def _adopt(rows: Sequence[_RowRecord], data: DataPlane) -> list[Cells]:
    try:
        return [data.adopt(row.data, row.lengths) for row in rows]
    except ColumnError as error:
        raise QueueError(f"the snapshot is corrupt: {error}") from None
