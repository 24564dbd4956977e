"""A pool of workers of one kind, which are replaced when they die.

    start ──▶ every worker is open ──▶ on_start
    run   ──▶ for each worker: reports ──▶ its events to the log, its lines to stderr
                       WorkerDied ──▶ on_death ──▶ another in its place ──▶ reports …
    call  ──▶ the worker of that place; while it has none, the caller waits for the replacement

`run` ends when every worker's `run` has returned. An error that a worker raises ends it too, since another process
would raise it again.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any

from tailrace.cluster.base import Cluster, Report, WorkerHandle, WorkerSpec, each
from tailrace.config.cluster import ClusterConfig
from tailrace.errors import ClusterError, TailraceError, WorkerDied
from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind

_WINDOW_S = 600.0
_LAST_WORDS_S = 5.0
"""Seconds for the last reports of a dead worker to arrive, since reports are batched."""


class DeathBudget:
    """Limits how many workers of a run may die within ten minutes. The pools of a run share one."""

    def __init__(self, max_deaths: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_deaths`: within ten minutes. `clock`: returns seconds."""
        self._max_deaths = max_deaths
        self._clock = clock
        self._deaths: deque[float] = deque()

    def spend(self, death: ClusterError) -> None:
        """Count `death`.

        Raises:
            ClusterError: more than `max_deaths` workers have died.
        """
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] <= now - _WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > self._max_deaths:
            raise ClusterError(
                f"{len(self._deaths)} workers died within {_WINDOW_S / 60:g} minutes, and cluster.max_deaths is "
                f"{self._max_deaths}; the last: {death}"
            ) from death


class _Hearing:
    """The progress of reading one worker's reports."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        """Set when the last report was read."""
        self.error: TailraceError | None = None
        """The error that has ended the reports, if any."""
        self._events = 0
        self._news = asyncio.Event()

    def has_come(self, report: Report) -> None:
        """Count the events of a report."""
        self._events += len(report.events)
        self._news.set()

    def end(self) -> None:
        """Note that no more reports come."""
        self.ended.set()
        self._news.set()

    async def of(self, events: int) -> None:
        """Wait until `events` events have come in all, or the reports have ended. Reports have limits of their own.

        Raises:
            TailraceError: the error that has ended the reports before that.
        """
        while self._events < events and not self.ended.is_set():
            self._news.clear()
            await self._news.wait()
        if self._events < events and self.error is not None:
            raise self.error


async def nothing(handle: WorkerHandle) -> None:
    """Do nothing with a worker that has started or died."""


class Pool:
    """Starts the workers of `specs`, passes on their reports, and replaces workers that die."""

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[WorkerSpec],
        config: ClusterConfig,
        log: EventLog,
        *,
        budget: DeathBudget | None,
        on_start: Callable[[WorkerHandle], Awaitable[None]] = nothing,
        on_death: Callable[[WorkerHandle], Awaitable[None]] = nothing,
    ) -> None:
        """Start nothing yet.

        Args:
            budget: limits the deaths; None: no worker is replaced.
            on_start: awaited when a worker is open, before it runs and gets calls.
            on_death: awaited before a replacement starts.
        """
        self._cluster = cluster
        self._specs = list(specs)
        """By index; that of a worker that was removed stays."""
        self._limit_s = 2 * config.start_limit_s
        """Seconds for a replacement to be placed and to open."""
        self._log = log
        self._budget = budget
        self._on_start = on_start
        self._on_death = on_death
        self._handles: list[WorkerHandle | None] = [None] * len(specs)
        self._without: set[int] = set()
        """The indices of workers that were removed, or could not be added."""
        self._tending: dict[int, asyncio.Task[None]] = {}
        """Tends each worker while `run` goes on."""
        self._end: asyncio.Future[None] | None = None
        """The end of `run`."""
        self._changed = asyncio.Event()
        """Set and replaced whenever a handle, or the failure, changes."""
        self._dead: set[WorkerHandle] = set()
        """The workers whose death a call has met, and `run` has not met yet."""
        self._hearing: dict[WorkerHandle, _Hearing] = {}
        """The workers whose reports `run` is reading."""
        self._failure: TailraceError | None = None
        """The error after which no dead worker is replaced."""

    @property
    def handles(self) -> list[WorkerHandle]:
        """The handles of the workers that are open and have not died."""
        return [handle for handle in self._handles if handle is not None]

    @property
    def names(self) -> list[str]:
        """The names of the workers, by their index."""
        return [spec.name for spec in self._specs]

    async def start(self) -> None:
        """Start all workers concurrently.

        Raises: see `Cluster.start`; the error of the first worker that fails.
        """
        await _together(*(self._start(index) for index in range(len(self._specs))))

    async def run(self) -> None:
        """Tend the workers until the `run` of each has returned.

        Raises:
            TailraceError: the error of a worker's `run`, or of a replacement's start.
            ClusterError: too many workers have died; without a budget, the WorkerDied of the first.
        """
        self._end = asyncio.get_running_loop().create_future()
        for index in range(len(self._specs)):
            if index not in self._without:
                self._begin_to_tend(index)
        try:
            await self._end
        except TailraceError as error:
            self._failure = error
            self._tell_change()
            raise
        finally:
            self._end = None
            tending = list(self._tending.values())
            for task in tending:
                task.cancel()
            if tending:
                await asyncio.wait(tending)

    async def add(self, spec: WorkerSpec) -> int:
        """Start one more worker, and return its index. It is tended as the others while `run` goes on.

        Raises: see `Cluster.start`; then there is no such worker.
        """
        index = len(self._specs)
        self._specs.append(spec)
        self._handles.append(None)
        self._without.add(index)
        await self._start(index)
        self._without.discard(index)
        if self._end is not None:
            self._begin_to_tend(index)
        return index

    async def remove(self, index: int) -> None:
        """Close one worker, and pass on its last reports. It is not replaced.

        Raises: see `WorkerHandle.close`.
        """
        self._without.add(index)
        if (tending := self._tending.pop(index, None)) is not None:
            tending.cancel()
            await asyncio.wait([tending])
        handle, self._handles[index] = self._handles[index], None
        if handle is not None:
            await self._close(handle)

    def _begin_to_tend(self, index: int) -> None:
        task = self._tending[index] = asyncio.create_task(self._tend(index))
        task.add_done_callback(lambda task: self._on_tended(index, task))

    def _on_tended(self, index: int, task: asyncio.Task[None]) -> None:
        """End `run` with the first error, or when the last worker's `run` has returned."""
        if self._tending.get(index) is not task:
            return  # it was removed
        del self._tending[index]
        error = None if task.cancelled() else task.exception()  # of several that end together, the first one is told
        if self._end is None or self._end.done() or task.cancelled():
            return
        if error is not None:
            self._end.set_exception(error)
        elif not self._tending:
            self._end.set_result(None)

    async def call(self, index: int, method: str, *args: Any) -> Any:
        """Call a command of the worker at `index`. If the worker is being replaced, wait for the replacement.

        While `run` goes on, the events that the worker has emitted by then are passed on before this returns. So there
        is never a checkpoint with steps that are missing in the log.

        Raises:
            WorkerDied: the worker died meanwhile, and its last reports were passed on. The command may or may not have
                taken effect.
            ClusterError: there is no worker, and no replacement came in time.
            TailraceError: see `WorkerHandle.call`.
        """
        return await self._call(index, await self._alive(index), method, args)

    async def _call(self, index: int, handle: WorkerHandle, method: str, args: Sequence[Any]) -> Any:
        try:
            value = await handle.call(method, *args)
            if hearing := self._hearing.get(handle):
                await hearing.of(handle.told)
            return value
        except WorkerDied as death:
            await self._hear_out(handle)
            if self._handles[index] is handle and handle not in self._dead:
                self._dead.add(handle)  # another call waits for the replacement
                self._tell_of(death)  # this error may end the run before `run` meets the death
            raise

    async def worker(self, index: int) -> "PooledWorker":
        """The worker at `index`. If it is being replaced, wait for the replacement.

        Raises:
            ClusterError: there is no worker, and no replacement came in time.
        """
        return PooledWorker(self, index, await self._alive(index))

    async def close(self) -> None:
        """Close all workers concurrently, and pass on their last reports. Calling this twice is harmless.

        Raises: see `WorkerHandle.close`; the first error, when all workers have ended.
        """
        await each(*(self._close(handle) for handle in self.handles))

    async def _close(self, handle: WorkerHandle) -> None:
        self._tell(handle.name, await handle.close())

    async def _alive(self, index: int) -> WorkerHandle:
        try:
            async with asyncio.timeout(self._limit_s):
                while (handle := self._handles[index]) is None or handle in self._dead:
                    if self._failure is not None:
                        raise self._failure
                    await self._changed.wait()
        except TimeoutError:
            name = self._specs[index].name
            raise ClusterError(f"worker {name} died, and was not replaced within {self._limit_s:g} s") from None
        return handle

    async def _start(self, index: int) -> None:
        began = self._log.now()
        try:
            name = self._specs[index].name
            handle = await self._cluster.start(self._specs[index], lambda text: self._tell_wait(name, text))
            opened = self._log.now()
            await self._prepare(handle)
        except WorkerDied as death:
            self._tell_of(death)
            raise
        self._handles[index] = handle
        self._tell_change()
        info = dict(handle.facts)
        self._log.emit(Event(task=EventKind.WORKER_STARTED, actor=handle.name, start=began, end=opened, info=info))

    async def _prepare(self, handle: WorkerHandle) -> None:
        try:
            await self._on_start(handle)
        except BaseException:  # nobody knows the worker yet
            await handle.kill()
            raise

    async def _tend(self, index: int) -> None:
        while True:
            handle = self._handles[index]
            try:
                if handle is None:
                    await self._start(index)
                else:
                    await self._pass_on(handle)
                    return
            except WorkerDied as death:
                await self._release(index, death)

    async def _pass_on(self, handle: WorkerHandle) -> None:
        hearing = self._hearing[handle] = _Hearing()
        try:
            async with aclosing(handle.reports()) as reports:
                async for report in reports:
                    self._tell(handle.name, report)
                    hearing.has_come(report)
        except TailraceError as error:
            hearing.error = error
            raise
        finally:
            del self._hearing[handle]
            hearing.end()

    async def _hear_out(self, dead: WorkerHandle) -> None:
        """Wait until `run` has read the last report of a dead worker, since its caller may then end `run`."""
        if hearing := self._hearing.get(dead):
            with suppress(TimeoutError):  # its machine may be gone too
                async with asyncio.timeout(_LAST_WORDS_S):
                    await hearing.ended.wait()

    def _tell(self, name: str, report: Report) -> None:
        for event in report.events:
            self._log.emit(event)
        for line in report.lines:
            print(f"{name}: {line}", file=sys.stderr)

    async def _release(self, index: int, death: WorkerDied) -> None:
        """Release the resources of a dead worker, so that a replacement can start.

        Raises:
            ClusterError: too many workers have died; without a budget, `death` itself.
        """
        handle, self._handles[index] = self._handles[index], None
        if handle is not None:  # else the worker had not opened, and its death is in the log
            if handle not in self._dead:
                self._tell_of(death)
            self._dead.discard(handle)
            await handle.kill()
            await self._on_death(handle)
        if self._budget is None:
            raise death
        self._budget.spend(death)

    def _tell_wait(self, name: str, text: str) -> None:
        now = self._log.now()
        self._log.emit(Event(task=EventKind.WORKER_WAITS, actor=name, start=now, end=now, info={"text": text}))

    def _tell_of(self, death: WorkerDied) -> None:
        if self._budget is None:
            self._failure = death  # at once, so that no call waits for a replacement meanwhile
            self._tell_change()
        now = self._log.now()
        info = {"pid": death.pid, "how": death.how}
        self._log.emit(Event(task=EventKind.WORKER_DIED, actor=death.worker, start=now, end=now, info=info))

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class PooledWorker:
    """One worker, until it dies; its replacement is another."""

    def __init__(self, pool: Pool, index: int, handle: WorkerHandle) -> None:
        self._pool = pool
        self._index = index
        self._handle = handle

    async def call(self, method: str, *args: Any) -> Any:
        """Call a command of it; see `Pool.call`.

        Raises:
            WorkerDied: it has died.
            TailraceError: see `Pool.call`.
        """
        return await self._pool._call(self._index, self._handle, method, args)


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all of `work` concurrently. The first error cancels the rest and is raised."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
