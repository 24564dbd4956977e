"""The base of every worker of a run: its configuration, its connection to the queue, its events, its device.

driver ──settings──▶ RunWorker.open: queue, device, what the kind of worker adds (`start`), the tasks of its pool
                     RunWorker.run:  its tasks, until the queue is closed; once a second events of its time and memory
                     until it is closed: a watch over computations that hang
"""

import asyncio
import faulthandler
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from tailrace.activity import Activity, TimedExecutor
from tailrace.algorithms.factory import make_run_algorithm
from tailrace.cluster.base import Worker, WorkerContext
from tailrace.config.cluster import pool_in_table
from tailrace.errors import EngineStuck, QueueClosed, QueueTimeout, first_error
from tailrace.events import EventLog
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.run.queue import client_options
from tailrace.run.workers.pools import actor_of, uses_device
from tailrace.run.workers.settings import RunSettings
from tailrace.tasks.base import Service
from tailrace.tasks.context import TaskContext
from tailrace.tasks.factory import make_services
from tailrace.tasks.memory import MemoryUse
from tailrace.transfer.queue.client.remote import RemoteQueue

_TELL_S = 1.0
"""Seconds between events about the worker's time and memory."""
_LOST_S = 0.5
"""Seconds for lost groups to be put again."""
_WATCH_S = 1.0
"""Seconds between checks how long it has been computing."""


class RunWorker(Worker):
    """A worker of one pool, with the tasks that the algorithm has there."""

    def __init__(self, settings: bytes, context: WorkerContext) -> None:
        self.settings = RunSettings.decode(settings)
        self.config = self.settings.run_config
        self.model_dir = Path(self.settings.model_dir)
        self.context = context
        self.log = EventLog(sinks=(context.emit,), worker=context.name, origin=self.settings.origin)
        self.algorithm = make_run_algorithm(self.config)
        pool, observe = self.settings.pool, self.config.observe
        self.activity = Activity(self.log, actor_of(pool), breakdown=observe.breakdown)
        device = self.config.device if uses_device(self.algorithm, pool) else "cpu"
        self.memory = MemoryUse(self.log, actor_of(pool), device)
        self.stack = AsyncExitStack()
        """Closed when the worker is."""
        thread = self.stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="device"))
        self.executor = TimedExecutor(thread, self.activity)
        self.queue: RemoteQueue
        self.tasks: TaskContext

    async def open(self) -> dict[str, Any]:
        """Connect and make the tasks; see `Worker`. `queue_client`: this worker's name in the queue, used once."""
        if uses_device(self.algorithm, self.settings.pool):
            from tailrace.host.compute import prepare_torch

            prepare_torch(self.config.device, None)
        name = f"{self.context.name}-{secrets.token_hex(4)}"
        queue = RemoteQueue(self.settings.queue, name=name, **client_options(self.config.queue))
        self.queue = await self.stack.enter_async_context(queue)
        self.tasks = TaskContext(
            config=self.config,
            model_dir=self.model_dir,
            queue=self.queue,
            log=self.log,
            activity=self.activity,
            memory=self.memory,
            executor=self.executor,
            stack=self.stack,
        )
        await self.start()
        self._services = await make_services(self.algorithm, pool_in_table(self.settings.pool), self.tasks)
        self.stack.callback(asyncio.create_task(self._watch_device()).cancel)
        return {"queue_client": name}

    async def start(self) -> None:
        """Make the parts of this kind of worker besides its tasks, before these are made with `tasks`."""

    def services(self) -> Sequence[Service]:
        """The services besides its tasks that run until the queue is closed."""
        return ()

    def background(self) -> Sequence[Service]:
        """The services besides its tasks that never end."""
        return ()

    async def run(self) -> None:
        """Run all services; see `Worker`. Of several errors it raises the one that explains the others.

        A worker whose engine stands still ends itself instead, so that another takes its place.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                endless = [tasks.create_task(service.run()) for service in self.background()]
                endless.append(tasks.create_task(self._tell_now_and_then()))
                await asyncio.gather(
                    *(tasks.create_task(service.run()) for service in (*self._services, *self.services()))
                )
                for task in endless:
                    task.cancel()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, EngineStuck):
                _end_process(str(error))
            raise error from errors
        self.tell()

    async def close(self) -> None:
        """See `Worker`."""
        await self.stack.aclose()

    async def grade(self, reward: str, request: GradingRequest) -> Grade:
        """Grade a response for an evaluation; see `WorkerGraders`."""
        pool = await self.tasks.grader_pool(reward)
        return await pool.grade(request)

    def tell(self) -> None:
        """Emit the events about the worker's time and memory since the last call."""
        self.activity.emit()
        if self.config.observe.breakdown:
            self.memory.emit()

    async def _tell_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            self.tell()

    async def _watch_device(self) -> None:
        """End this process when a computation hangs: nothing else can."""
        limit_s = self.config.cluster.computation_limit_s
        while True:
            await asyncio.sleep(_WATCH_S)
            if self.executor.computing_s > limit_s:
                _end_process(f"a computation has taken longer than cluster.computation_limit_s ({limit_s:g} s)")


def _end_process(why: str) -> NoReturn:
    """End this process, whose device hangs: nothing else can."""
    faulthandler.dump_traceback()
    print(why, flush=True)
    os._exit(1)


class UntilClosed:
    """A service that only waits until the queue is closed, for a worker that the driver commands."""

    def __init__(self, queue: RemoteQueue) -> None:
        self._queue = queue

    async def run(self) -> None:
        """See `Service`."""
        with suppress(QueueClosed):
            while True:
                with suppress(QueueTimeout):
                    await self._queue.lost_groups()  # ends with the queue
                    await asyncio.sleep(_LOST_S)  # the groups stay lost until another service has put them again
