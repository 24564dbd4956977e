"""The workers of one kind, kept alive.

    start ──▶ every worker is open
    run   ──▶ for each worker: reports ──▶ its events to the log, its lines to stderr
                       WorkerDied ──▶ on_death ──▶ another in its place ──▶ reports …
    call  ──▶ the worker of that place; while it has none, the caller waits for the replacement

`run` ends when every worker's `run` has returned. An error that a worker raises ends it: that is no accident that
another process would mend.
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
"""For what a dead worker had told to arrive, batched as it is."""


class DeathBudget:
    """How many workers of a run may die within ten minutes. Its pools share one."""

    def __init__(self, max_deaths: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._max_deaths = max_deaths
        self._clock = clock
        self._deaths: deque[float] = deque()

    def spend(self, death: ClusterError) -> None:
        """Count `death`.

        Raises:
            ClusterError: it is one too many.
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
    """How far the reports of one worker have been read."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        """The last one was read."""
        self.error: TailraceError | None = None
        """What has ended them, where something has."""
        self._events = 0
        self._news = asyncio.Event()

    def has_come(self, report: Report) -> None:
        """Count what it has brought."""
        self._events += len(report.events)
        self._news.set()

    def end(self) -> None:
        """No more comes."""
        self.ended.set()
        self._news.set()

    async def of(self, events: int) -> None:
        """Wait until so many events have come; as long as reports come at all, which has limits of its own.

        Raises:
            TailraceError: what has ended the reports before that.
        """
        while self._events < events and not self.ended.is_set():
            self._news.clear()
            await self._news.wait()
        if self._events < events and self.error is not None:
            raise self.error


async def _nothing(handle: WorkerHandle) -> None:
    pass


class Pool:
    """Starts the workers of `specs`, passes on what they report, and replaces those that die."""

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[WorkerSpec],
        config: ClusterConfig,
        log: EventLog,
        *,
        budget: DeathBudget | None,
        on_death: Callable[[WorkerHandle], Awaitable[None]] = _nothing,
    ) -> None:
        """`budget`: of deaths; without one nobody is replaced. `on_death` is awaited before another starts."""
        self._cluster = cluster
        self._specs = specs
        self._limit_s = 2 * config.start_limit_s
        """For a replacement: a place is found, and the worker opens."""
        self._log = log
        self._budget = budget
        self._on_death = on_death
        self._handles: list[WorkerHandle | None] = [None] * len(specs)
        self._changed = asyncio.Event()
        """Set and replaced whenever a handle, or the failure, changes."""
        self._dead: set[WorkerHandle] = set()
        """Of which a call has said so, before `run` has heard of it."""
        self._hearing: dict[WorkerHandle, _Hearing] = {}
        """Those whose reports `run` reads, until it has read the last one."""
        self._failure: TailraceError | None = None
        """Why nobody who is dead will be replaced."""

    @property
    def handles(self) -> list[WorkerHandle]:
        """Of the workers that are open and have not died."""
        return [handle for handle in self._handles if handle is not None]

    async def start(self) -> None:
        """Start every worker, side by side.

        Raises: as Cluster.start, for the first one that fails.
        """
        await _together(*(self._start(index) for index in range(len(self._specs))))

    async def run(self) -> None:
        """Tend the workers until each one's `run` has returned.

        Raises:
            TailraceError: what a worker's `run` raised, or a replacement's start.
            ClusterError: too many have died; without a budget WorkerDied, of the first one.
        """
        try:
            await _together(*(self._tend(index) for index in range(len(self._specs))))
        except TailraceError as error:
            self._failure = error
            self._tell_change()
            raise

    async def call(self, index: int, method: str, *args: Any) -> Any:
        """Call a command of the worker at `index`; of its replacement, while that is on its way.

        While `run` goes on, what the worker has emitted by then is passed on before this returns. So there is never a
        checkpoint with steps of which nobody has heard.

        Raises:
            WorkerDied: it died meanwhile, and what it had told was passed on. It may have done what it was asked for,
                or not.
            ClusterError: there is no worker, and no replacement came in time.
            TailraceError: as WorkerHandle.call.
        """
        handle = await self._alive(index)
        try:
            value = await handle.call(method, *args)
            if hearing := self._hearing.get(handle):
                await hearing.of(handle.told)
            return value
        except WorkerDied as death:
            await self._hear_out(handle)
            if self._handles[index] is handle and handle not in self._dead:
                self._dead.add(handle)  # who calls again waits for its replacement
                self._tell_of(death)  # this error may end the run before `run` hears of it
            raise

    async def close(self) -> None:
        """Close every worker, side by side, and pass on what they still have to tell. Twice is harmless.

        Raises: as WorkerHandle.close, the first error, when all have ended.
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
            handle = await self._cluster.start(self._specs[index])
        except WorkerDied as death:
            self._tell_of(death)
            raise
        self._handles[index] = handle
        self._tell_change()
        info = dict(handle.facts)
        self._log.emit(
            Event(task=EventKind.WORKER_STARTED, actor=handle.name, start=began, end=self._log.now(), info=info)
        )

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
                await self._bury(index, death)

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
        """Wait until `run` has read its last report: whoever hears of its death may end `run`."""
        if hearing := self._hearing.get(dead):
            with suppress(TimeoutError):  # its machine is gone, too
                async with asyncio.timeout(_LAST_WORDS_S):
                    await hearing.ended.wait()

    def _tell(self, name: str, report: Report) -> None:
        for event in report.events:
            self._log.emit(event)
        for line in report.lines:
            print(f"{name}: {line}", file=sys.stderr)

    async def _bury(self, index: int, death: WorkerDied) -> None:
        """Give back what it had, so that another can start."""
        handle, self._handles[index] = self._handles[index], None
        if handle is not None:  # else it had not opened, and its death is in the log
            if handle not in self._dead:
                self._tell_of(death)
            self._dead.discard(handle)
            await handle.kill()
            await self._on_death(handle)
        if self._budget is None:
            raise death
        self._budget.spend(death)

    def _tell_of(self, death: WorkerDied) -> None:
        if self._budget is None:
            self._failure = death  # at once: while the dead is buried, nobody shall wait for a replacement
            self._tell_change()
        now = self._log.now()
        info = {"pid": death.pid, "how": death.how}
        self._log.emit(Event(task=EventKind.WORKER_DIED, actor=death.worker, start=now, end=now, info=info))

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Do it side by side. The first error ends all the rest, and is raised itself."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
