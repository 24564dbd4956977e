"""The parts beside a training loop of the caller's own: queue, workers and prompts, in a thread with an event loop."""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from tailrace.cluster.factory import make_cluster
from tailrace.cluster.pool import DeathBudget
from tailrace.config.cluster import REWARD, PoolConfig, kind_of_pool
from tailrace.config.run import RunConfig
from tailrace.errors import (
    ClusterError,
    QueueClosed,
    QueueError,
    UserError,
    first_error,
)
from tailrace.events import Event, EventFile, EventLog
from tailrace.host.interrupt import Interrupt
from tailrace.registers.events import EventKind
from tailrace.report.samples import SampleFile
from tailrace.report.workers import death_text
from tailrace.rewards.answers import check_answers
from tailrace.run.control import control
from tailrace.run.directory import RunDirectory
from tailrace.run.fleet import Fleet
from tailrace.run.generation import Generation
from tailrace.run.inputs import Inputs
from tailrace.run.log import begin_log, end_event
from tailrace.run.observer import Observer
from tailrace.run.queue import OpenQueue, open_queue, run_table
from tailrace.run.separated import Workers
from tailrace.run.workers.weights import make_sender
from tailrace.tasks.base import Service
from tailrace.tasks.prompts import PromptLine, put_lost_groups
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import TransferQueue
from tailrace.transfer.weights.sender import WeightSender
from tailrace.types import Prompt, WeightVersion

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
_CLOSE_LIMIT_S = 120.0
"""Seconds for all processes to end; each has a shorter limit of its own."""


def log_warnings(event: Event) -> None:
    """Log warnings and deaths: a sink for a program without a display, which would show them."""
    if event.task == EventKind.WORKER_DIED:
        _log.warning(death_text(event))
    elif event.about.is_urgent:
        _log.warning(event.info[event.about.tells])


class LoopRuntime:
    """Runs queue, workers and prompts beside the caller, in a thread with its own event loop."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, pools: Mapping[str, PoolConfig], *, longest_prompt: int
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._pools = pools
        self._longest_prompt = longest_prompt
        self._ready: Future[QueueAddress] = Future()
        self._stop = Interrupt()
        self._failure: BaseException | None = None
        self._told = False
        # a daemon: a program that forgets to close it can end, and its processes end with it
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._log: EventLog
        self._line: PromptLine
        self._sender: WeightSender
        self._fleet: Fleet

    def start(self) -> QueueAddress:
        """Start everything and return the queue's address."""
        self._thread.start()
        try:
            return self._ready.result()  # every part that is started has a limit of its own
        except BaseException:
            self.close()
            raise

    def put(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts to the line."""
        self._loop.call_soon_threadsafe(self._line.add, tuple(prompts))

    def tell(self, event: Event) -> None:
        """Emit an event of the caller. After a failure it is lost; the failure itself is reported elsewhere."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._emit, event)

    def now(self) -> float:
        """Seconds since the run began."""
        return self._log.now()

    def publish(self, version: WeightVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send weights to the engines."""
        self._sender.publish(version, weights)

    def settle(self, version: WeightVersion) -> None:
        """Wait until the engines have installed `version`, where the mode says so."""
        if self._config.weights_mode == "synchronous":
            self._wait(self._sender.installed(version, timeout_s=self._config.weights.timeout_s))

    def check(self) -> None:
        """Raise the error that has ended it, if any."""
        if self._failure is not None:
            self._told = True
            raise self._failure
        if self._stop.asked:
            raise ClusterError("these engines were closed; start others with init_engines")

    def raise_untold(self) -> None:
        """Raise the error that has ended it, unless `check` has raised it already."""
        if not self._told:
            self._told = True
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """End everything. A second call is harmless."""
        self._stop.ask()
        self._thread.join(_CLOSE_LIMIT_S)
        if self._thread.is_alive():
            raise ClusterError(f"the engines have not ended within {_CLOSE_LIMIT_S:g} s")

    def _emit(self, event: Event) -> None:
        if self._failure is not None:
            return
        try:
            self._log.emit(event)
        except UserError as error:  # it cannot be written: the next call raises it
            self._failure = self._failure or error

    def scale(self, workers: int, pool: str) -> str:
        """See `Fleet.scale`."""
        return self._wait(self._fleet.scale(workers, pool))

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the event loop and wait for it; each part of it has a limit."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError:  # the loop has ended
            raise QueueClosed("the engines have ended") from None

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass  # it was closed
        except BaseException as error:  # any error: the caller gets it
            self._failure = self._failure or error
            if not self._ready.done():
                self._told = True
                self._ready.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            with self._stop.watching():
                queue, services = await self._open(stack)
                assert queue.address is not None
                self._ready.set_result(queue.address)
                await self._serve(queue.queue, services)

    async def _open(self, stack: AsyncExitStack) -> tuple[OpenQueue, list[Service]]:
        config, directory = self._config, RunDirectory(Path(self._config.output_dir))
        stack.enter_context(directory.locked())
        directory.check_new()  # again: another process may have been faster
        if REWARD in map(kind_of_pool, self._pools):
            await check_answers(config.rewards, self._inputs.prompts.by_source)
        cluster = await stack.enter_async_context(make_cluster(config.cluster, self._pools))
        queue = await open_queue(config.queue, run_table(config), directory.queue, stack)
        with directory.begun(config, resumed=False):
            file = stack.enter_context(closing(EventFile(directory.events)))
            sinks = (file, SampleFile(directory.samples), log_warnings)
            log = self._log = begin_log(config, None, sinks, total_steps=None)
            self._sender = stack.enter_context(
                make_sender(config, address=cluster.address, datacentre=cluster.datacentre, log=log)
            )
            workers = Workers(
                config,
                self._inputs,
                self._pools,
                cluster,
                queue,
                directory.checkpoints,
                log,
                DeathBudget(config.cluster.max_deaths),
                longest_prompt=self._longest_prompt,
            )
            await stack.enter_async_context(workers)
            await workers.start(self._sender.address)
        self._line = PromptLine(
            queue.queue,
            seed=config.seed,
            group_size=config.algorithm.group_size,
            groups_per_step=config.groups_per_step,
            max_staleness=config.pipeline.max_staleness,
        )
        generation = Generation(
            config,
            workers.engines(),
            queue.queue,
            self._inputs.decode,
            log,
            lengths=self._inputs.lengths,
            model=self._inputs.model_kind,
        )
        fleet = self._fleet = Fleet(config.cluster.rollout, workers, generation.service, log)
        generation.serve_beside(fleet)
        await stack.enter_async_context(control(directory.path, fleet.scale))
        return queue, [*workers.services, generation, Observer(queue.queue, log)]

    async def _serve(self, queue: TransferQueue, services: Sequence[Service]) -> None:
        """Serve until cancelled or failed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for service in services:
                    tasks.create_task(service.run())
                tasks.create_task(self._line.run())
                tasks.create_task(put_lost_groups(queue, self._line.group_again))
        except BaseExceptionGroup as errors:
            self._failure = first_error(errors)
            with suppress(UserError):  # the disk may be full, which may be the failure itself
                self._log.emit(end_event(self._log, self._failure, finished=False))
            with suppress(QueueError):  # the queue may have failed itself
                await queue.close()  # the caller may wait for rows, and gets the error instead
            raise self._failure from errors
