"""One rank of a data-parallel group talks to the queue and broadcasts what it gets (AsyncFlow, section 3.5).

    src:  queue ──claim──▶ header, all int64 cells in one tensor, all float32 cells in another ──broadcast──▶ the others

The group asks the queue once, and nothing is padded: arrays travel one after the other, their lengths in the header,
which is msgpack. Only `src` acks.

Who waits on whom: all ranks on `src`, which waits on the queue, up to its timeout; the group's own timeout must be
longer. What `src` gets instead of a claim is raised on every rank, so none is left waiting.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from tailrace.errors import QueueError, TailraceError
from tailrace.transfer.queue.adapters.layouts import Array, listed
from tailrace.transfer.queue.base import Claim, Row, RowId
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.wire.messages import Failure
from tailrace.types import Value

_DTYPES: Mapping[str, np.dtype[Any]] = {"ints": np.dtype(np.int64), "floats": np.dtype(np.float32)}
"""The tensors that go along with a header."""


class _Row(msgspec.Struct, frozen=True, array_like=True):
    id: RowId
    group_id: int
    order: int
    units: tuple[int, ...]


class _Column(msgspec.Struct, frozen=True, array_like=True):
    name: str
    tensor: str | None
    """Where its arrays are; None where it has none."""
    cells: list[Any]
    """Of each row the length of its array, or its value."""


class _Header(msgspec.Struct, frozen=True, array_like=True, tag=True):
    lease_id: int
    lease_s: float
    task: str
    rows: list[_Row]
    columns: list[_Column]


_HEADERS: msgspec.msgpack.Decoder[_Header | Failure] = msgspec.msgpack.Decoder(_Header | Failure)


class GroupLoader:
    """Yields claims of one task on every rank of a group, until `rows` rows have been claimed in all.

        for claim in GroupLoader(queue if rank == src else None, "actor", rows=32, src=src, group=group):
            ...
            if queue is not None:
                queue.ack(claim, outputs)

    Otherwise as `StreamingLoader`: the rank that has the queue acks or nacks every claim, and holds it meanwhile, see
    `SyncQueue.held`. A claim that does not reach all ranks is given back. Iterating raises, on all ranks, what
    `TransferQueue.claim` raises on `src`.
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
        """`queue`: of `src`, the global rank of the process that asks; None on the others. `group`: by default all.

        `device`: of the tensors that the group's backend takes. `rank`, `timeout`: see `StreamingLoader`.

        Raises:
            QueueError: a queue on another rank than `src`, or none on it.
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
        """The loader itself."""
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
            return error  # for all ranks


def broadcast_claim(
    outcome: Claim | TailraceError | None,
    *,
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Claim:
    """The claim of `src` on every rank of `group`. Arrays are read-only.

    `outcome`: on `src` (a global rank) the claim, or the error that came instead; None on the others.

    Raises:
        TailraceError: the error of `src`.
    """
    header, tensors = (b"", {}) if outcome is None else _encode(outcome)
    own = [np.frombuffer(header, np.uint8), *(tensors.get(name, np.empty(0, dtype)) for name, dtype in _DTYPES.items())]
    sizes = torch.tensor([len(array) for array in own], device=device)
    dist.broadcast(sizes, src, group)
    head, *arrays = [
        _broadcast(array if outcome is not None else np.empty(size, array.dtype), src, group, device)
        for array, size in zip(own, sizes.tolist(), strict=True)
    ]
    if isinstance(outcome, Claim):
        return outcome
    if outcome is not None:
        raise outcome
    return _decode(head.tobytes(), dict(zip(_DTYPES, arrays, strict=True)))


def _broadcast(array: Array, src: int, group: dist.ProcessGroup | None, device: torch.device | str) -> Array:
    """`array` of `src`, read-only; on the others one of its size."""
    if len(array):
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
        dist.broadcast(tensor, src, group)
        array = tensor.cpu().numpy()
        array.flags.writeable = False
    return array


def _encode(outcome: Claim | TailraceError) -> tuple[bytes, dict[str, Array]]:
    """The header, and the tensors: column by column, all arrays one after the other."""
    if isinstance(outcome, TailraceError):
        return msgspec.msgpack.encode(Failure.of(outcome)), {}
    arrays: dict[str, list[Array]] = {name: [] for name in _DTYPES}
    columns = []
    for column, first in outcome.rows[0].cells.items():
        if isinstance(first, np.ndarray):
            [tensor] = [name for name, dtype in _DTYPES.items() if dtype == first.dtype]
            own = listed(outcome.rows, column)
            arrays[tensor] += own
            columns.append(_Column(column, tensor, list(map(len, own))))
        else:
            columns.append(_Column(column, None, [row.cells[column] for row in outcome.rows]))
    rows = [_Row(row.id, row.group_id, row.order, row.units) for row in outcome.rows]
    header = _Header(outcome.lease_id, outcome.lease_s, outcome.task, rows, columns)
    tensors = {name: np.concatenate([np.empty(0, dtype), *arrays[name]]) for name, dtype in _DTYPES.items()}
    return msgspec.msgpack.encode(header), tensors


def _decode(header: bytes, tensors: Mapping[str, Array]) -> Claim:
    message = _HEADERS.decode(header)
    if isinstance(message, Failure):
        raise message.error()
    cells: list[dict[str, Value]] = [{} for _ in message.rows]
    starts = dict.fromkeys(tensors, 0)
    for column in message.columns:
        for own, cell in zip(cells, column.cells, strict=True):
            if column.tensor is not None:
                start = starts[column.tensor]
                starts[column.tensor] = end = start + cell
                cell = tensors[column.tensor][start:end]
            own[column.name] = cell
    rows = [
        Row(id=row.id, group_id=row.group_id, order=row.order, cells=own, units=row.units)
        for row, own in zip(message.rows, cells, strict=True)
    ]
    return Claim(lease_id=message.lease_id, lease_s=message.lease_s, task=message.task, rows=tuple(rows))
