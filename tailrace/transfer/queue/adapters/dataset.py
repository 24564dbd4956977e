"""A task's rows as an iterable data set for PyTorch (AsyncFlow, sections 3.1 and 3.4).

    DataLoader ──starts──▶ workers ──ask──▶ Claimant (a thread of this process) ──▶ controller
        ▲                     │ └──fetch──▶ units
        └──── TensorBatch ────┘ tensors, by PyTorch's own transport
    this process: trains on a batch, then acks it

No row is delivered twice, whatever the number of workers: this process claims, one claim after the other, and workers
only fetch cells and lay them out. The worker that asks first gets the next claim. A batch has arrived when it is
unpickled here. When a worker ends, its batches that have not arrived go back, and another iteration gets them.

Waiting: a worker waits for rows. With `in_order=False` the loop waits for any worker that has a batch. Otherwise
PyTorch asks its workers in turn, and a worker that waits for rows holds up the batches of the others. A loader claims
ahead: `num_workers * prefetch_factor` batches beside the one in hand. This process renews their leases, so they may
wait for any time.
"""

import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from io import BufferedReader
from types import TracebackType
from typing import Any, Self

import msgspec
from torch.utils.data import IterableDataset, get_worker_info

from tailrace.errors import PeerLost, QueueError, StaleRowError, UserError
from tailrace.transfer.queue.adapters.claimant import Answer, Arrived, Ask, Claimant, Next, Over
from tailrace.transfer.queue.adapters.tensors import (
    Column,
    Layout,
    TensorBatch,
    check_layouts,
    make_batch,
    make_outputs,
)
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import Claim, RowId
from tailrace.transfer.queue.client.checks import check_address
from tailrace.transfer.queue.client.look import read_table
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.messages import Claimed
from tailrace.transfer.queue.rows.schema import Schema, check_limit
from tailrace.transfer.wire.messages import Failure

_WATCH_S = 1.0
"""Seconds between checks whether the process that claims is still there."""
_ARRIVAL_LIMIT_S = 5.0
"""Seconds for the claimant's thread to answer that a batch has arrived; it never waits itself."""
_CLAIM = tuple(field.name for field in fields(Claim))


class StreamingDataset(IterableDataset[TensorBatch]):
    """The batches of one task: each has the rows of one claim.

        with StreamingDataset(QueueAddress.read(path), "actor", rows=512, layouts={"prompt_ids": Pad(0)}) as dataset:
            for batch in DataLoader(dataset, batch_size=None, num_workers=4, in_order=False):
                ...
                dataset.ack(batch, {"advantages": advantages})

    `batch_size` is None, since the task's policy chooses the rows of a batch. `in_order` is False, so that a batch
    comes as soon as it is ready. The loop ends when `rows` rows have been delivered in all, over all workers and
    iterations, or when the queue is closed. Batches are acked in the process that made the data set, before the block
    is left, in any order.

    When a loop is left in the middle or a worker is killed, the batches that were fetched ahead go back, and the next
    loop gets them. Batches that PyTorch itself has taken from a worker and keeps (with `in_order`, `pin_memory` or
    `persistent_workers`) count as delivered. At the end of the block all rows that were not acked go back at once. If
    this process dies, they go back when the queue has not heard from it for `limit_s`. If workers still wait for rows
    when a loop is left, PyTorch gives them 5 s each before it ends them. `close` the data set first, and they end at
    once.

    Iterating raises the errors of `TransferQueue.claim`, and ColumnError if a column cannot have its layout.
    """

    def __init__(
        self,
        address: QueueAddress,
        task: str,
        *,
        rows: int | None = None,
        limit: int | None = None,
        rank: int | None = None,
        layouts: Mapping[str, Layout] | None = None,
        timeout_s: float = 3600.0,
        shared_memory: bool = True,
        limit_s: float = 30.0,
    ) -> None:
        """`rows`: how many rows to deliver; None for all until the queue is closed.

        `limit`: the most rows in a batch. `rank`: see `TransferQueue.claim`; `rows` then counts the rows of that rank.
        `layouts`: the layouts of columns of arrays, packed by default, see `tensors`. `timeout_s`: how long a claim may
        wait. `shared_memory`, `limit_s`: see `RemoteQueue`.

        Raises:
            UserError: `address` is not a QueueAddress, or that of a queue of several controllers.
            QueueError: `limit` is below 1.
        """
        check_address(address)
        if address.others:
            raise UserError(
                f"a data set's workers fetch rows that another process has claimed, which needs queue.controllers=1; "
                f"the queue has {len(address.each)}; claim with a SyncQueue, or serve it with one"
            )
        check_limit(limit)
        self._address = address
        self._task = task
        self._layouts = dict(layouts or {})
        self._timeout_s = timeout_s
        self._shared_memory = shared_memory
        self._limit_s = limit_s
        self._rows = rows
        self._limit = limit
        self._rank = rank
        self._claimant: Claimant | None = None
        self._socket = ""
        self._desk: socket.socket | None = None

    def __enter__(self) -> Self:
        """Start to claim, so that the data set can be iterated over.

        Raises:
            UserError: the queue cannot be reached from this host.
            PeerLost: the queue does not answer.
            QueueError: the queue has no such task.
            ColumnError: a layout is for a column that the task does not read, or that holds no arrays.
        """
        table = read_table(self._address, name=f"data set of {self._task}", limit_s=self._limit_s)
        spec = Schema(table.tasks).task(self._task)
        self._kinds = table.columns
        check_layouts(self._layouts, spec.reads, self._kinds, task=self._task)
        queue = RemoteQueue(
            self._address,
            name=f"data set of {self._task}",
            timeout_s=self._timeout_s,
            shared_memory=self._shared_memory,
            limit_s=self._limit_s,
        )
        claimant = Claimant(queue, self._task, rows=self._rows, limit=self._limit, rank=self._rank)
        claimant.start()
        self._claimant, self._socket = claimant, claimant.socket
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the data set, see `close`."""
        self.close()

    def close(self) -> None:
        """End all iterations and give back all rows that were not acked. Calling this twice is harmless."""
        self._own.close()

    def ack(self, batch: TensorBatch, outputs: Mapping[str, Column]) -> None:
        """Write the task's outputs for all rows of `batch`, in their order, and mark them consumed, in one step.

        Raises:
            ColumnError, LeaseError, StaleRowError: see `TransferQueue.ack`. ColumnError also if a column does not have
                one cell for each row.
            QueueClosed: the data set was closed.
        """
        self._own.ack(batch.claim, make_outputs(batch.claim, outputs, self._kinds))

    def nack(self, batch: TensorBatch, rows: Sequence[RowId] | None = None) -> None:
        """Give rows back, see `TransferQueue.nack`. They count as delivered: another client may have to claim them."""
        self._own.nack(batch.claim, rows)

    def __iter__(self) -> Iterator[TensorBatch]:
        """Yield batches. The process that iterates fetches them: a worker of a DataLoader, or the process itself.

        Raises:
            PeerLost: the process that claims is gone.
        """
        if not self._socket:
            raise QueueError("a data set is iterated over inside its block: with StreamingDataset(...) as dataset")
        with ExitStack() as stack:
            desk = socket.socket(socket.AF_UNIX)
            if get_worker_info() is None:
                stack.enter_context(desk)
            else:  # kept open until the worker ends: batches that it has fetched ahead are still on their way
                stack.callback(self._keep, desk)
            try:
                desk.connect(self._socket)
            except (FileNotFoundError, ConnectionRefusedError):
                return  # the data set was closed before this worker had started: there are no more claims
            queue = stack.enter_context(self._connect())
            yield from self._batches(desk, stack.enter_context(desk.makefile("rb")), queue)

    def _keep(self, desk: socket.socket) -> None:
        if self._desk is not None:
            self._desk.close()
        self._desk = desk

    def _batches(self, desk: socket.socket, lines: BufferedReader, queue: SyncQueue) -> Iterator[TensorBatch]:
        ask: Next = Next()
        while True:
            match _ask(desk, lines, ask):
                case Over():
                    return
                case Failure() as failure:
                    raise failure.error()
                case Claimed() as claimed:
                    claim = _fetch(queue, self._task, claimed)
                    ask = Next(claimed.lease_id if claim is None else None)
                    if claim is not None:
                        yield self._deliver(desk, lines, make_batch(claim, self._kinds, self._layouts))

    def _deliver(self, desk: socket.socket, lines: BufferedReader, batch: TensorBatch) -> TensorBatch:
        """Report that the batch has arrived: now, or, from a worker, when the batch is unpickled in the parent."""
        if get_worker_info() is None:
            _ask(desk, lines, Arrived(batch.claim.lease_id))
            return batch
        return replace(batch, claim=_Sent(desk=self._socket, **{name: getattr(batch.claim, name) for name in _CLAIM}))

    def _connect(self) -> SyncQueue:
        return SyncQueue(
            self._address,
            name=f"worker for {self._task}",
            shared_memory=self._shared_memory,
            limit_s=self._limit_s,
        )

    @property
    def _own(self) -> Claimant:
        if self._claimant is None or get_worker_info() is not None:
            raise QueueError("a data set acks and nacks inside its block, in the process that entered it")
        return self._claimant

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, without the claimant and the socket."""
        return self.__dict__ | {"_claimant": None, "_desk": None}


def _fetch(queue: SyncQueue, task: str, claimed: Claimed) -> Claim | None:
    """Return the claim with its cells; None if the units do not have the cells (any more)."""
    try:
        return queue.fetch(task, claimed)
    except (PeerLost, StaleRowError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent(Claim):
    """A claim in a worker. When it is unpickled, it reports to the claimant that it has arrived."""

    desk: str
    """The path of the claimant's socket."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.desk, {name: getattr(self, name) for name in _CLAIM})


def _receive(desk: str, claim: dict[str, Any]) -> Claim:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as own:  # the data set was closed, and its rows are back
        own.settimeout(_ARRIVAL_LIMIT_S)
        own.connect(desk)
        own.sendall(msgspec.json.encode(Arrived(claim["lease_id"])) + b"\n")
        own.recv(1)  # the claimant has noted this before the worker hangs up
    return Claim(**claim)


def _ask(desk: socket.socket, lines: BufferedReader, ask: Ask) -> Answer:
    desk.sendall(msgspec.json.encode(ask) + b"\n")
    if not _hears(desk):
        return Over()
    if not (line := lines.readline()):
        raise _gone()
    answer: Answer = _ANSWERS.decode(line)
    return answer


def _hears(desk: socket.socket) -> bool:
    """Wait for an answer. Return False if the data set was closed before it had accepted this connection.

    Neither the close nor the end of the parent hangs up the socket: a forked worker has copies of all sockets.

    Raises:
        PeerLost: the parent is gone.
    """
    parent, closed = os.getppid(), False
    while not select.select([desk], [], [], _WATCH_S)[0]:
        if get_worker_info() is not None and os.getppid() != parent:
            raise _gone()
        if closed:
            return False
        closed = not os.path.exists(desk.getpeername())  # an answer that was sent before can be read in the next round
    return True


def _gone() -> PeerLost:
    return PeerLost("the process that claims rows for this worker is gone")


_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
