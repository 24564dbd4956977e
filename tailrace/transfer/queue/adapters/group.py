"""Claims for a data-parallel group: one rank talks to the queue and broadcasts the rows (AsyncFlow, section 3.5).

    src:  queue ──claim──▶ header, cells: one tensor of bytes ──broadcast──▶ the others

The group asks the queue once. Cells are sent as they lie in the queue's memory (see `cells`), one after the other. The
header has their lengths, in msgpack. Only `src` acks.

Waiting: all ranks wait for `src`, which waits for the queue up to its timeout. The group's own timeout must be longer.
An error that `src` gets is raised on every rank, so none is left waiting.
"""

from contextlib import ExitStack
from typing import Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from tailrace.config.columns import ColumnKind
from tailrace.errors import QueueError, TailraceError
from tailrace.transfer.queue.base import Claim, Row, RowId
from tailrace.transfer.queue.cells import PartCodec, Parts, write_rows
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.messages import pack, unpack
from tailrace.transfer.wire.messages import Failure
from tailrace.types import Value


class _Row(msgspec.Struct, frozen=True, array_like=True):
    id: RowId
    group_id: int
    order: int
    units: tuple[int, ...]


class _Header(msgspec.Struct, frozen=True, array_like=True, tag=True):
    lease_id: int
    lease_s: float
    task: str
    rows: list[_Row]
    kinds: dict[str, ColumnKind]
    """The kind by which each column is sent, in the order of the cells. Cells that are not arrays are sent as JSON."""
    lengths: bytes
    """[rows, columns] packed, see `Parts.lengths`."""


_HEADERS: msgspec.msgpack.Decoder[_Header | Failure] = msgspec.msgpack.Decoder(_Header | Failure)


class GroupLoader:
    """Yields claims of one task on every rank of a group, until `rows` rows have been claimed in all.

        for claim in GroupLoader(queue if rank == src else None, "actor", rows=32, src=src, group=group):
            ...
            if queue is not None:
                queue.ack(claim, outputs)

    The rest is as for `StreamingLoader`. The rank that has the queue acks or nacks every claim, and holds it meanwhile,
    see `SyncQueue.held`. A claim that does not reach all ranks is given back. If `TransferQueue.claim` raises an error
    on `src`, iterating raises it on all ranks.
    """

    def __init__(
        self,
        queue: SyncQueue | None,
        task: str,
        *,
        rows: int,
        src: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        rank: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """`src`: the global rank of the process that asks the queue. `queue`: on `src`; None on the other ranks.

        `group`: by default all ranks. `device`: the device of the tensors that the group's backend takes. `rank`,
        `timeout`: see `StreamingLoader`.

        Raises:
            QueueError: another rank than `src` has a queue, or `src` has none.
        """
        if (queue is not None) != (dist.get_rank() == src):
            raise QueueError(
                f"rank {dist.get_rank()} of a group whose rank {src} asks the queue was given "
                f"{'none' if queue is None else 'one'}; pass it on rank {src} alone"
            )
        self._queue = queue
        self._task = task
        self._wanted = rows
        self._src = src
        self._group = group
        self._device = device
        self._rank = rank
        self._timeout = timeout

    def __iter__(self) -> Self:
        """Return the loader itself."""
        return self

    def __next__(self) -> Claim:
        """Wait for the next claim."""
        if self._wanted <= 0:
            raise StopIteration
        outcome = self._claim()
        with ExitStack() as lost:
            if self._queue is not None and isinstance(outcome, Claim):
                lost.callback(self._queue.nack, outcome)
            claim = broadcast_claim(outcome, src=self._src, group=self._group, device=self._device)
            lost.pop_all()
        self._wanted -= len(claim.rows)
        return claim

    def _claim(self) -> Claim | TailraceError | None:
        if self._queue is None:
            return None
        try:
            return self._queue.claim(self._task, limit=self._wanted, rank=self._rank, timeout=self._timeout)
        except TailraceError as error:
            return error  # it is broadcast, and raised on all ranks


def broadcast_claim(
    outcome: Claim | TailraceError | None,
    *,
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Claim:
    """Return the claim of `src` on every rank of `group`. Arrays are read-only.

    `outcome`: on `src` (a global rank) the claim, or the error that came instead; None on the other ranks.

    Raises:
        TailraceError: the error of `src`.
    """
    header, parts = (b"", []) if outcome is None else _encode(outcome)
    sizes = torch.tensor([len(header), sum(alike.nbytes for alike in parts)], device=device)
    dist.broadcast(sizes, src, group)
    end, nbytes = sizes.tolist()
    start = end + (-end & 7)  # so that arrays among the cells are aligned
    message = np.zeros(start + nbytes, np.uint8)
    if outcome is not None:
        message[:end] = np.frombuffer(header, np.uint8)
        write_rows(parts, message.data[start:])
    tensor = torch.from_numpy(message).to(device)
    dist.broadcast(tensor, src, group)
    if isinstance(outcome, Claim):
        return outcome
    if outcome is not None:
        raise outcome
    memory = tensor.cpu().numpy().data.toreadonly()
    return _decode(memory[:end], memory[start:])


def _encode(outcome: Claim | TailraceError) -> tuple[bytes, list[Parts]]:
    if isinstance(outcome, TailraceError):
        return msgspec.msgpack.encode(Failure.of(outcome)), []
    kinds = {column: _kind(cell) for column, cell in outcome.rows[0].cells.items()}
    parts = PartCodec(kinds).measure_rows({column: row.cells[column] for column in kinds} for row in outcome.rows)
    rows = [_Row(row.id, row.group_id, row.order, row.units) for row in outcome.rows]
    [alike] = parts
    header = _Header(outcome.lease_id, outcome.lease_s, outcome.task, rows, kinds, pack(alike.lengths))
    return msgspec.msgpack.encode(header), parts


def _kind(cell: Value) -> ColumnKind:
    """Return the kind by which a cell is sent: arrays as they are, all others as JSON."""
    if not isinstance(cell, np.ndarray):
        return ColumnKind.JSON
    return ColumnKind.INTS if cell.dtype == np.int64 else ColumnKind.FLOATS


def _decode(header: memoryview, memory: memoryview) -> Claim:
    message = _HEADERS.decode(header)
    if isinstance(message, Failure):
        raise message.error()
    codec, columns = PartCodec(message.kinds), tuple(message.kinds)
    lengths = unpack(message.lengths, 1).reshape(len(message.rows), len(columns))
    sizes = codec.cell_sizes(columns, lengths)
    starts = sizes.cumsum().reshape(sizes.shape) - sizes
    cells: list[dict[str, Value]] = [{} for _ in message.rows]
    for place, column in enumerate(columns):
        where = np.column_stack([np.zeros_like(starts[:, place]), starts[:, place]])  # all cells lie in one memory
        for own, cell in zip(cells, codec.read_column(column, [memory], where, lengths[:, place]), strict=True):
            own[column] = cell
    rows = [
        Row(id=row.id, group_id=row.group_id, order=row.order, cells=own, units=row.units)
        for row, own in zip(message.rows, cells, strict=True)
    ]
    return Claim(lease_id=message.lease_id, lease_s=message.lease_s, task=message.task, rows=tuple(rows))
