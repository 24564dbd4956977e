"""Workers in the event loop of the driver, without processes, for tests of the code that drives workers."""

import asyncio
import os
import socket
from asyncio import Task
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from tailrace.cluster.base import (
    CANCEL_LIMIT_S,
    CLOSE_LIMIT_S,
    HEARTBEAT_S,
    Cluster,
    Outbox,
    Report,
    Worker,
    WorkerContext,
    WorkerHandle,
    WorkerSpec,
    call_method,
    cancelled_itself,
    close_unopened,
    each,
    foreign,
    is_ours,
    make_worker,
)
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import WorkerDied
from tailrace.events import Event
from tailrace.host.cpu import usable_cores

Result = TypeVar("Result")

_CLOSED = "closed"
_KILL_LIMIT_S = 1.0
"""Seconds for a killed worker's tasks to end. Later they are left alone: they can be cancelled, and not killed."""


class LocalHandle(WorkerHandle):
    """A worker in this event loop. A kill cancels all of its tasks."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.name = spec.name
        self.pid = os.getpid()
        self.facts = {}
        self._spec = spec
        self._outbox = Outbox()
        self._tasks: set[Task[Any]] = set()
        self._died: str | None = None
        self._gone = asyncio.Event()
        """Set when the worker has died, and its tasks have ended or are left alone."""
        self._worker: Worker | None = None

    async def open(self, limit_s: float) -> None:
        """Make the worker and open it, within `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                facts = await self._guarded(self._open())
        except TimeoutError:
            await self._end(f"killed, since it had not opened within {limit_s:g} s")
            raise self._obituary() from None
        except BaseException as error:
            await close_unopened(self.name, error, self.close())
            raise
        self.facts = facts | {
            "pid": self.pid,
            "host": socket.gethostname(),
            "address": "127.0.0.1",
            "node": "local",
            "keeper": self.pid,
            "datacentre": "",
            "cores": usable_cores(),
        }

    async def _open(self) -> dict[str, Any]:
        context = WorkerContext(name=self.name, address="127.0.0.1", datacentre="", emit=self._emit)
        self._worker = make_worker(self._spec.factory, self._spec.settings, context)
        return await self._worker.open()

    def _emit(self, event: Event) -> None:
        if self._died in (None, _CLOSED):  # a killed process emits no more events
            self._outbox.emit(event)

    async def reports(self) -> AsyncGenerator[Report, None]:
        """See `WorkerHandle`."""
        if self._died is not None:
            raise self._obituary()
        assert self._worker is not None
        run = asyncio.create_task(self._guarded(self._worker.run()))
        run.add_done_callback(lambda _: self._outbox.poke())
        try:
            while not run.done():
                await self._outbox.wait(HEARTBEAT_S)
                yield Report(events=self._outbox.take())
        finally:
            run.cancel()
            await asyncio.wait([run], timeout=CANCEL_LIMIT_S)
        await asyncio.sleep(0)  # so that its last events arrive
        yield Report(events=self._outbox.take())
        await run

    async def call(self, method: str, *args: Any) -> Any:
        """See `WorkerHandle`."""
        if self._died is not None:
            raise self._obituary()
        assert self._worker is not None
        value = await self._guarded(call_method(self._worker, method, args))
        await asyncio.sleep(0)  # so that its last events arrive
        self.told = self._outbox.told
        return value

    async def _guarded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, or raise its error as the driver sees it.

        Raises:
            WorkerDied: the worker was killed before or meanwhile.
        """
        if self._died is not None:
            work.close()
            raise self._obituary()
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)
        try:
            await self._end_of(task)
        except asyncio.CancelledError:
            task.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_LIMIT_S):
                    await self._end_of(task)
            raise
        if not task.done():
            raise self._obituary()
        if task.cancelled():
            raise self._obituary() if self._died is not None else cancelled_itself(self.name)
        try:
            return task.result()
        except Exception as error:  # the driver gets every error
            if is_ours(error):
                raise
            raise foreign(self.name, error) from error

    async def _end_of(self, task: Task[Any]) -> None:
        """Wait until `task` has ended, or the worker is gone."""
        gone = asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()

    def _obituary(self) -> WorkerDied:
        return WorkerDied.of(self.name, self.pid, self._died or _CLOSED)

    async def close(self) -> Report:
        """See `WorkerHandle`."""
        if self._died is None:
            await self._end(_CLOSED, CLOSE_LIMIT_S)
            try:
                await self.free()
            except Exception as error:  # the driver gets every error
                if is_ours(error):
                    raise
                raise foreign(self.name, error) from error
        await asyncio.sleep(0)  # so that its last events arrive
        return Report(events=self._outbox.take())

    async def kill(self) -> None:
        """See `WorkerHandle`."""
        await self._end("killed")

    async def free(self) -> None:
        """Close a killed worker, so that it releases what a process would lose at its end.

        Calling it twice is harmless.
        """
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(TimeoutError):  # a process would be killed now
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await worker.close()

    async def _end(self, how: str, limit_s: float = _KILL_LIMIT_S) -> None:
        self._died = self._died or how
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=limit_s)
        finally:
            self._gone.set()


def _retrieve(task: Task[Any]) -> None:
    """Retrieve the task's error, since asyncio would log one whose caller got a cancellation or a death instead."""
    if not task.cancelled():
        task.exception()


class LocalCluster(Cluster):
    """Starts workers in this event loop, one after another: a process loads one model at a time with transformers."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.handles: list[LocalHandle] = []
        """The handles of all workers that were started."""
        self._opening = asyncio.Lock()

    @property
    def address(self) -> str:
        """See `Cluster`."""
        return "127.0.0.1"

    @property
    def datacentre(self) -> str:
        """See `Cluster`."""
        return ""

    async def check_room(self, pools: Mapping[str, PoolConfig]) -> None:
        """See `Cluster`. There is room for all."""

    async def start(self, spec: WorkerSpec, on_wait: Callable[[str], None] = lambda _: None) -> LocalHandle:
        """See `Cluster`."""
        handle = LocalHandle(spec)
        self.handles.append(handle)
        async with self._opening:
            await handle.open(self._config.start_limit_s)
        return handle

    async def close(self) -> None:
        """See `Cluster`."""
        await each(*(self._end(handle) for handle in self.handles))

    async def _end(self, handle: LocalHandle) -> None:
        await handle.kill()
        await handle.free()
