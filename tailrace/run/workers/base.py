"""What every worker of a run has: its configuration, its connection to the queue, its events, its device.

driver ──settings──▶ RunWorker.open: queue, device, what the kind of worker adds (`start`)
                     RunWorker.run:  its services, until the queue is closed; once a second where its time went
                     until it is closed: whether its device still gets anywhere
"""

import asyncio
import faulthandler
import os
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tailrace.activity import Activity, TimedExecutor
from tailrace.cluster.base import Worker, WorkerContext
from tailrace.errors import first_error
from tailrace.events import EventLog
from tailrace.run.queue import client_options
from tailrace.run.workers.settings import RunSettings
from tailrace.transfer.queue.base import Claim
from tailrace.transfer.queue.client.remote import RemoteQueue

_ACTIVITY_S = 1.0
"""Between events of where the worker's time went."""
_WATCH_S = 1.0
"""Between looks at how long it has been computing."""


class WatchedQueue(RemoteQueue):
    """Counts the time in which claims wait."""

    def __init__(self, settings: RunSettings, activity: Activity, *, name: str) -> None:
        super().__init__(settings.queue, name=name, **client_options(settings.run_config.queue))
        self._activity = activity

    async def claim(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claim:
        """See `TransferQueue.claim`."""
        with self._activity.waiting("data"):
            return await super().claim(task, limit=limit, rank=rank, timeout=timeout)


class RunWorker(Worker):
    """A worker with the tasks of one kind."""

    actor: str
    """Whose time its activity is."""
    uses_device = True
    """Whether it computes on the run's device."""

    def __init__(self, settings: bytes, context: WorkerContext) -> None:
        self.settings = RunSettings.decode(settings)
        self.config = self.settings.run_config
        self.model_dir = Path(self.settings.model_dir)
        self.context = context
        self.log = EventLog(sinks=(context.emit,), worker=context.name, origin=self.settings.origin)
        self.activity = Activity(self.log, self.actor)
        self.stack = AsyncExitStack()
        """Closed when the worker is."""
        self.executor = self.stack.enter_context(TimedExecutor(self.activity))
        """The device's."""
        self.queue: WatchedQueue

    async def open(self) -> dict[str, Any]:
        """See `Worker`. `queue_client`: by which name the queue knows this worker, and none after it."""
        if self.uses_device:
            from tailrace.host.compute import prepare_torch

            prepare_torch(self.config.device, None)
        name = f"{self.context.name}-{secrets.token_hex(4)}"
        queue = WatchedQueue(self.settings, self.activity, name=name)
        self.queue = await self.stack.enter_async_context(queue)
        facts = {"queue_client": name, **await self.start()}
        self.stack.callback(asyncio.create_task(self._watch_device()).cancel)
        return facts

    @abstractmethod
    async def start(self) -> dict[str, Any]:
        """Make what `services` needs; further facts."""

    @abstractmethod
    def services(self) -> Sequence[Any]:
        """What serves, each with a `run` that ends when the queue is closed."""

    def background(self) -> Sequence[Any]:
        """What serves beside them, each with a `run` that never ends."""
        return ()

    async def run(self) -> None:
        """See `Worker`. Of the errors of several services it raises the one that explains the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                endless = [tasks.create_task(service.run()) for service in self.background()]
                endless.append(tasks.create_task(self._tell_activity()))
                await asyncio.gather(*(tasks.create_task(service.run()) for service in self.services()))
                for task in endless:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        self.activity.emit()

    async def close(self) -> None:
        """See `Worker`."""
        await self.stack.aclose()

    async def _tell_activity(self) -> None:
        while True:
            await asyncio.sleep(_ACTIVITY_S)
            self.activity.emit()

    async def _watch_device(self) -> None:
        """End this process when a computation hangs, which nothing else can end."""
        limit_s = self.config.cluster.computation_limit_s
        while True:
            await asyncio.sleep(_WATCH_S)
            if self.executor.computing_s > limit_s:
                faulthandler.dump_traceback()
                print(f"a computation has taken longer than cluster.computation_limit_s ({limit_s:g} s)", flush=True)
                os._exit(1)
