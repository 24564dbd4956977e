"""Snapshots of a queue: msgpack with a versioned header, the table, the control plane's state and all rows' cells."""

from collections.abc import Mapping, Sequence

import msgspec

from tailrace.config.columns import ColumnKind
from tailrace.errors import UNREADABLE, ColumnError, QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.rows.state import ControlState, check_state
from tailrace.types import TaskSpec

_FORMAT = "tailrace transfer queue"
_VERSION = 4


class _Header(msgspec.Struct):
    format: str
    version: int


class _Snapshot(_Header):
    tasks: list[TaskSpec]
    columns: dict[str, ColumnKind]
    control: ControlState
    parts: list[bytes]
    """One part for each row of `control`, with all of the row's cells in the order of its lengths."""


def encode_snapshot(
    tasks: Sequence[TaskSpec], columns: Mapping[str, ColumnKind], control: ControlState, parts: Mapping[RowId, bytes]
) -> bytes:
    """Return the bytes that `decode_snapshot` reads. `parts`: one for each row, its cells in the order of lengths."""
    in_order = [parts[row.id] for row in control.rows]
    return msgspec.msgpack.encode(_Snapshot(_FORMAT, _VERSION, list(tasks), dict(columns), control, in_order))


def decode_snapshot(
    snapshot: bytes, tasks: Sequence[TaskSpec], columns: Mapping[str, ColumnKind]
) -> tuple[ControlState, dict[RowId, bytes]]:
    """Validate a snapshot for a queue of `tasks` and `columns`. Return its state, and the part of each row.

    Raises:
        QueueError: the bytes are corrupt, of another version or another table, or no snapshot.
    """
    record = _parse(snapshot)
    _check_table(record, tasks, columns)
    check_state(record.control, tasks)
    _check_parts(record, columns)
    return record.control, {row.id: part for row, part in zip(record.control.rows, record.parts, strict=True)}


def _parse(snapshot: bytes) -> _Snapshot:
    try:
        header = msgspec.msgpack.decode(snapshot, type=_Header)
        if (header.format, header.version) != (_FORMAT, _VERSION):
            raise QueueError(
                f"the snapshot is {header.format!r} version {header.version}; expected {_FORMAT!r} version {_VERSION}"
            )
        return msgspec.msgpack.decode(snapshot, type=_Snapshot)
    except UNREADABLE as error:
        raise QueueError(f"these {len(snapshot)} bytes are not a snapshot of a transfer queue: {error}") from None


def _check_table(record: _Snapshot, tasks: Sequence[TaskSpec], columns: Mapping[str, ColumnKind]) -> None:
    if record.tasks != list(tasks):
        theirs, ours = map(_listed, (record.tasks, tasks))
        raise QueueError(f"the snapshot is of another table: it has {theirs}, this queue has {ours}")
    for column, kind in record.columns.items():
        if columns.get(column) is not kind:
            raise QueueError(f"column {column!r} of the snapshot holds {kind}; in this queue: {columns.get(column)}")


def _listed(tasks: Sequence[TaskSpec]) -> list[tuple[str, list[str], list[str]]]:
    return [(task.name, list(task.reads), list(task.writes)) for task in tasks]


def _check_parts(record: _Snapshot, columns: Mapping[str, ColumnKind]) -> None:
    codec, rows = PartCodec(columns), record.control.rows
    if len(record.parts) != len(rows):
        raise QueueError(f"the snapshot is corrupt: it has {len(rows)} rows and the cells of {len(record.parts)}")
    try:
        for row, part in zip(rows, record.parts, strict=True):
            codec.read(memoryview(part), row.facts.lengths, row.facts.lengths)
    except ColumnError as error:
        raise QueueError(f"the snapshot is corrupt: {error}") from None
