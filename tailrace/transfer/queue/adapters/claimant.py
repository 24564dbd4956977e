"""The claimant of a data set: a thread that holds all leases, while worker processes fetch the cells.

    worker ──Next──▶ Claimant ──lease──▶ controller        one claim at a time, so that rows are counted here alone
           ◀─Claimed──  │
           ──fetch─────────────────────▶ units             each worker by itself
    loop   ──Arrived──▶ │                                  a batch has come out of its worker
                        │
    ack, nack ─────────▶└── renews every lease until it ends; gives back the leases still held at the end

Messages of workers are JSON lines over a socket that only this user can open. The queue knows one client, the process
that acks: when it dies, all of its rows go back. When a worker dies or hangs up, it leaves the line, and the rows that
it was given and that have not arrived go back and are wanted again. So a worker stays connected until all of its
batches have arrived.

Waiting: a worker waits for the claims of the workers that asked before it, each up to the queue's timeout. Rows that a
worker could not fetch are given back after a pause, and are wanted again.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from tailrace.errors import LeaseError, PeerLost, QueueClosed, TailraceError, on_failure
from tailrace.transfer.queue.base import Claim, RowId
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.messages import Claimed, unpack
from tailrace.transfer.socket_directory import socket_directory
from tailrace.transfer.wire.messages import Failure, Message
from tailrace.types import Value

T = TypeVar("T")

_PAUSE_S = 0.2
"""Seconds before rows whose cells did not come are claimed again: their unit may be back, or known to be lost."""


class Next(Message, frozen=True):
    """A worker wants a claim."""

    unfetched: int | None = None
    """The lease of the worker's claim before, if its cells did not come."""


class Arrived(Message, frozen=True):
    """The rows of a lease have reached the process that acks: their worker may end. It is also the answer to itself."""

    lease_id: int


class Over(Message, frozen=True):
    """There will be no more claims."""


Ask: TypeAlias = Next | Arrived
Answer: TypeAlias = Claimed | Over | Failure | Arrived
"""The answers to Next; Arrived is the answer to Arrived."""


@dataclass(slots=True, eq=False)
class _Held:
    claim: Claim
    """The claim, without rows: only its lease is needed."""
    rows: int
    """The number of rows that were not acked."""
    worker: "_Worker | None"
    """The worker that has the rows; None once they have arrived."""


class Claimant:
    """Claims rows of a task for workers that ask at `socket`, from `start` to `close`."""

    socket: str
    """The path of the socket at which workers connect, known after `start`."""

    def __init__(self, queue: RemoteQueue, task: str, *, rows: int | None, limit: int | None, rank: int | None) -> None:
        """`queue`: used by this thread alone. `rows`: how many to claim in all; None for as many as come.

        `limit`, `rank`: passed to each claim.
        """
        self._queue = queue
        self._task = task
        self._wanted = rows
        self._limit = limit
        self._rank = rank
        self._held: dict[int, _Held] = {}
        self._workers: set[_Worker] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="claimant")

    def start(self) -> None:
        """Start the thread, and return when workers can connect.

        Raises:
            OSError: the socket cannot be made.
        """
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._ended = self._thread.submit(asyncio.run, self._serve(started))
        first: list[Future[Any]] = [started, self._ended]
        wait(first, return_when=FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()
        self._loop = started.result()

    def close(self) -> None:
        """Send workers away and give back all rows that were not acked. Calling this twice is harmless.

        The first call raises the error that had ended the thread before, if any.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):  # the thread has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._close)
        self._thread.shutdown()
        self._ended.result()

    def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
        """See `TransferQueue.ack`."""
        self._run(self._queue.ack(claim, outputs))
        self._run(self._forget(claim, len(outputs)))

    def nack(self, claim: Claim, rows: Sequence[RowId] | None) -> None:
        """See `TransferQueue.nack`. The rows are not wanted again."""
        self._run(self._queue.nack(claim, rows))
        self._run(self._forget(claim, len(claim.rows if rows is None else rows)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread and wait for its result; the queue's limits end the wait.

        Raises:
            QueueClosed: the thread has ended, or ends meanwhile.
        """
        outcome: Future[T] = Future()
        with suppress(RuntimeError):  # the thread's loop is closed
            outcome = asyncio.run_coroutine_threadsafe(work, self._loop)
        either: list[Future[Any]] = [outcome, self._ended]
        wait(either, return_when=FIRST_COMPLETED)
        if not outcome.done() or outcome.cancelled():
            work.close()  # it will never run
            raise QueueClosed("this data set was closed: its rows have gone back")
        return outcome.result()

    # Methods that run in the thread

    async def _serve(self, started: "Future[asyncio.AbstractEventLoop]") -> None:
        loop = asyncio.get_running_loop()
        self._closing = loop.create_future()
        self._turn = asyncio.Lock()
        with socket_directory() as directory:
            self.socket = f"{directory}/claims"
            async with self._queue:
                server = await asyncio.start_unix_server(self._connect, self.socket)
                started.set_result(loop)
                try:
                    await self._closing
                finally:
                    server.close()
                    await self._end()

    def _close(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task. An error that it raises ends the thread, and `close` raises it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._closing.done():
            self._closing.set_exception(error)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = _Worker(writer)
        self._workers.add(worker)
        worker.asking = self._spawn(self._attend(worker, reader))

    async def _attend(self, worker: "_Worker", reader: asyncio.StreamReader) -> None:
        """Answer a worker until it hangs up. Then the rows that it was given and that have not arrived go back."""
        with suppress(ConnectionError):  # the worker was killed before it had read its answer
            while (line := await reader.readline()).endswith(b"\n"):  # else the worker was killed while it wrote
                worker.answering = self._spawn(self._reply(worker, _ASKS.decode(line)))
        worker.close()
        self._workers.discard(worker)
        for held in list(self._held.values()):
            if held.worker is worker:
                self._unhold(held)
                self._spawn(self._give_back(held))

    async def _reply(self, worker: "_Worker", ask: Ask) -> None:
        with on_failure(worker.writer.close):  # so that the worker does not wait for ever
            try:
                answer = await self._answer(worker, ask)
            except TailraceError as error:
                answer = Failure.of(error)
            worker.send(answer)

    async def _end(self) -> None:
        tasks = self._tasks.copy()
        for worker in self._workers:
            worker.send_away()
        if self._renewing is not None:
            self._renewing.cancel()
        if tasks:
            await asyncio.wait(tasks)  # a cancelled claim gives its own rows back
        await asyncio.gather(*map(self._give_back, self._held.values()))

    async def _give_back(self, held: _Held) -> None:
        try:
            await self._queue.nack(held.claim)
        except PeerLost:
            return  # if the queue comes back, it takes the rows back, since this client is silent

    async def _answer(self, worker: "_Worker", ask: Ask) -> Answer:
        match ask:
            case Next(unfetched):
                return await self._next(worker, unfetched)
            case Arrived(lease_id):
                if (held := self._held.get(lease_id)) is not None:
                    held.worker = None
                return ask

    async def _next(self, worker: "_Worker", unfetched: int | None) -> Answer:
        if unfetched is not None:
            await self._take_back(unfetched)
        async with self._turn:
            if self._wanted is not None and self._wanted <= 0:
                return Over()
            bounds = [bound for bound in (self._limit, self._wanted) if bound is not None]
            try:
                claimed = await self._queue.lease(self._task, limit=min(bounds, default=None), rank=self._rank)
            except QueueClosed:
                return Over()
            self._hold(worker, claimed)
            return claimed

    def _hold(self, worker: "_Worker", claimed: Claimed) -> None:
        rows = len(unpack(claimed.rows, 4))
        claim = Claim(lease_id=claimed.lease_id, lease_s=claimed.lease_s, task=self._task, rows=())
        self._held[claim.lease_id] = _Held(claim, rows, worker)
        self._want(-rows)
        if self._renewing is None:
            self._renewing = self._spawn(self._renew(claim.lease_s / 3))

    def _want(self, rows: int) -> None:
        if self._wanted is not None:
            self._wanted += rows

    def _unhold(self, held: _Held) -> None:
        """Forget a held claim, so that its rows are wanted again."""
        del self._held[held.claim.lease_id]
        self._want(held.rows)

    async def _take_back(self, lease_id: int) -> None:
        await asyncio.sleep(_PAUSE_S)
        held = self._held.get(lease_id)
        if held is not None:
            await self._give_back(held)
            if lease_id in self._held:
                self._unhold(held)

    async def _forget(self, claim: Claim, rows: int) -> None:
        """Note that `rows` rows of a claim were acked or nacked. Forget the claim when none is left."""
        held = self._held.get(claim.lease_id)
        if held is not None:
            held.rows -= rows
            if held.rows <= 0:
                del self._held[claim.lease_id]

    async def _renew(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            for held in list(self._held.values()):
                try:
                    await self._queue.renew(held.claim)
                except PeerLost:
                    continue  # the controller may be back in time; if not, the ack will say so
                except LeaseError:
                    self._held.pop(held.claim.lease_id, None)  # the lease has expired, and the ack will say so


class _Worker:
    """The connection of a worker, which asks one question at a time."""

    asking: asyncio.Task[None]
    """The task that waits for the worker's questions."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.answering: asyncio.Task[None] | None = None

    def send(self, answer: Answer) -> None:
        """Send an answer, and return at once. If it does not arrive, the worker is gone."""
        self.writer.write(msgspec.json.encode(answer) + b"\n")

    def close(self) -> None:
        """Hang up, and cancel the answer that is being prepared."""
        if self.answering is not None:
            self.answering.cancel()
        self.writer.close()

    def send_away(self) -> None:
        """Tell the worker that there are no more claims, and hang up."""
        self.send(Over())
        self.writer.write_eof()  # a worker that was forked later may hold this end open
        self.asking.cancel()
        self.close()


_ASKS: msgspec.json.Decoder[Ask] = msgspec.json.Decoder(Ask)
