"""Engines for a training loop of the caller's own (AsyncFlow, section 5.1).

    caller's thread                           thread `engines`, and processes
    put_prompts_data ────prompts──▶ line ──rows, as weights admit them──▶ queue ◀──▶ rollout, reward, reference
    get_experience_data ◀─────────claims───────────────────────────────── queue
    put_experience_data ──────────acks──────────────────────────────────▶ queue
    weight_sync_notify ──tensors──▶ WeightSender ───────────────────────────────────▶ rollout
                       ──version────────────────────────────────────────▶ queue: the next prompts go in

Who waits on whom: `get_experience_data` on rows that the tasks before have finished, up to `queue.timeout_s`;
`weight_sync_notify`, with `weights.mode: synchronous` alone, on engines that install. `put_prompts_data` on nobody:
what may not go in yet waits in the line. Workers are started, watched and replaced as in a run (run/separated.py).
"""

import asyncio
import logging
import threading
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tailrace.algorithms.factory import make_algorithm
from tailrace.cluster.factory import make_cluster
from tailrace.cluster.pool import DeathBudget
from tailrace.config.cluster import PoolConfig
from tailrace.config.run import RunConfig
from tailrace.errors import (
    ClusterError,
    ConfigError,
    NothingGraded,
    PromptError,
    QueueClosed,
    QueueError,
    QueueTimeout,
    TailraceError,
    UserError,
    WeightsError,
    did_you_mean,
    first_error,
)
from tailrace.events import Event, EventFile, EventLog
from tailrace.host.compute import prepare_torch
from tailrace.host.interrupt import Interrupt
from tailrace.planning.admission import oldest_version
from tailrace.prompts.load import tell_dropped
from tailrace.report.page import write_report
from tailrace.report.samples import SampleFile
from tailrace.report.trace import write_trace
from tailrace.report.workers import death_text
from tailrace.rewards.answers import check_answers
from tailrace.run.directory import RunDirectory
from tailrace.run.inputs import Inputs, load_inputs
from tailrace.run.loop_diary import LoopDiary
from tailrace.run.observer import Observer
from tailrace.run.queue import OpenQueue, check_queue, client_options, open_queue, run_table
from tailrace.run.separated import Workers
from tailrace.run.train import begin_log, end_event
from tailrace.run.workers.pools import run_pools
from tailrace.run.workers.settings import check_gpus
from tailrace.run.workers.weights import make_sender
from tailrace.tasks.actor import train_sample
from tailrace.tasks.base import Service
from tailrace.tasks.prompts import group_rows, put_lost_groups
from tailrace.trainer.base import Loss, Trainer, TrainSample
from tailrace.trainer.factory import make_run_trainer
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import NewRow, TransferQueue
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.experience import Experience
from tailrace.transfer.queue.tensors import Column, Layout, TensorBatch, make_cells
from tailrace.transfer.weights.sender import WeightSender
from tailrace.types import Prompt, WeightVersion

_log = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 120.0
"""For all processes to end; each has a shorter limit of its own."""


def log_warnings(event: Event) -> None:
    """A sink for a program without a display: the log has what that would show of warnings and deaths."""
    if event.task == "warning":
        _log.warning(event.info["text"])
    elif event.task == "worker_died":
        _log.warning(death_text(event))


class Engines:
    """The workers of a recipe, but no trainer. For the thread that made it.

        with Trainer("recipe.yaml").init_engines() as engines:
            engines.put_prompts_data(engines.prompts)
            for version in range(1, 101):
                batch = engines.get_experience_data()
                with engines.held(batch):
                    train(model, batch.columns)
                    engines.put_experience_data(batch)
                engines.weight_sync_notify(version, model.named_parameters())

    Step s of training is the s-th `trainer.train_batch_size` samples, in the order in which their prompts were put.
    Their responses begin when version s - `pipeline.max_staleness` was notified, and not before.

    A worker that dies is replaced, and the caller does not notice. What cannot be mended (an error of a task, too many
    deaths) is raised by the call that waits, by the next one, or at last by `close`.
    """

    def __init__(
        self, config: RunConfig, *, workers: Collection[str] | None = None, prompts: bytes | None = None
    ) -> None:
        """See `Trainer.init_engines`, which makes it. `prompts`: see `train`."""
        kinds = _kinds(config, workers)
        directory = RunDirectory(Path(config.output_dir))
        directory.check_new()
        with directory.holding(prompts):
            self._start(config, kinds)

    def _start(self, config: RunConfig, kinds: dict[str, PoolConfig]) -> None:
        check_queue(config.queue, run_table(config))
        self._config = config
        self._inputs = load_inputs(config)
        tell_dropped(self._inputs.prompts.dropped)
        self._groups = 0
        """Prompts that were put."""
        self._steps = 0
        """Steps of which rows were claimed to be trained on."""
        self._failed: list[str] = []
        """Errors of the newest rows, since the last one whose grading succeeded."""
        self._closed = False
        self._unfinished: WeightVersion | None = None
        """The version that was sent, and that the queue does not know yet."""
        self._longest_prompt = max(self._inputs.longest_prompt, config.prompts.max_prompt_tokens or 0)
        self._runtime = _Runtime(config, self._inputs, kinds, longest_prompt=self._longest_prompt)
        address = self._runtime.start()
        try:
            self._queue = SyncQueue(address, name="caller", **client_options(config.queue))
        except BaseException:
            self._runtime.close()
            raise
        self._experience = Experience(self._queue)
        self._diary = LoopDiary(config, tell=self._runtime.tell, clock=self._runtime.now)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it. An error of the block goes on, with a note of what `close` would have raised."""
        try:
            self.close()
        except TailraceError as failure:
            if error is None:
                raise
            error.add_note(f"meanwhile the engines have failed: {failure}")

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Of the recipe, to train on, in the order of their source."""
        return self._inputs.prompts.train

    @property
    def held_out(self) -> tuple[Prompt, ...]:
        """Of the recipe, not to be trained on."""
        return self._inputs.prompts.held_out

    @property
    def model_dir(self) -> Path:
        """Of the initial weights, for `AutoModelForCausalLM.from_pretrained`."""
        return self._inputs.model_dir

    @property
    def loss(self) -> Loss:
        """Of the recipe's algorithm, for `Trainer.accumulate`."""
        _, work = make_algorithm(self._config.resolved_algorithm).policy_task()
        return work.loss

    def make_trainer(self) -> Trainer:
        """The recipe's trainer in this process, with the initial weights; it knows nothing of the engines.

        It computes on `device`, on a CPU with as many threads as torch has in this process.

        Raises:
            UserError: it cannot be made as configured, or there is no such device.
        """
        prepare_torch(self._config.device, None)
        return make_run_trainer(self._config, self.model_dir)

    def train_samples(self, batch: TensorBatch) -> list[TrainSample]:
        """The rows of a batch of the actor, for `Trainer.accumulate`.

        Raises:
            ColumnError: `batch.columns` were replaced by something that is none.
        """
        cells = make_cells(batch.columns, self._queue.columns, rows=len(batch.claim.rows))
        return [train_sample(replace(row, cells=own)) for row, own in zip(batch.claim.rows, cells, strict=True)]

    def put_prompts_data(self, prompts: Sequence[Prompt]) -> list[int]:
        """Have `algorithm.group_size` responses generated for each; returns at once, with the group_ids.

        Each goes in as soon as weights admit its step and the queue has room; the order is that of the calls.

        Raises:
            PromptError: one is no `tailrace.types.Prompt`, longer than the engines were started for, or empty; none was
                put.
            TailraceError: the workers have failed.
        """
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise PromptError(
                    f"{prompt!r:.80} is a {type(prompt).__name__}, not a tailrace.types.Prompt, which has token ids; "
                    "put those of `prompts`, or your own made with the model's tokenizer"
                )
            if not 0 < len(prompt.prompt_ids) <= self._longest_prompt:
                raise PromptError(
                    f"prompt {prompt.prompt_id} has {len(prompt.prompt_ids)} tokens, and the engines were started for "
                    f"1 to {self._longest_prompt}; raise prompts.max_prompt_tokens for longer ones"
                )
        with self._calling():
            self._runtime.put(prompts)
        first, self._groups = self._groups, self._groups + len(prompts)
        return list(range(first, self._groups))

    def get_experience_data(
        self,
        task: str = "actor",
        *,
        count: int | None = None,
        layouts: Mapping[str, Layout] | None = None,
        timeout: float | None = None,
    ) -> TensorBatch:
        """Claim rows of `task`; wait until there are some. The columns are those that the task reads, as tensors.

        For the actor, rows with advantages: `count` of them in whole groups, the earliest first; with
        `pipeline.streaming` fewer, a micro-batch of them as soon as it is there.

        `count`: at most; by default `trainer.train_batch_size`. `layouts`, `timeout` (seconds): see `Experience`.

        Raises:
            ColumnError, QueueError, QueueTimeout: see `Experience.get_experience_data`.
            NothingGraded: a step's worth of gradings have failed, one after the other.
            TailraceError: the workers have failed.
        """
        limit = self._config.trainer.train_batch_size if count is None else count
        with self._calling():
            batch = self._experience.get_experience_data(task, count=limit, layouts=layouts, timeout=timeout)
        if task == "actor":
            self._diary.took(batch, self._queue.columns)
            newest = max((row.order for row in batch.claim.rows), default=-1)
            self._steps = max(self._steps, newest // self._config.trainer.train_batch_size + 1)
            self._check_graded(batch)
        return batch

    def _check_graded(self, batch: TensorBatch) -> None:
        """Raises NothingGraded where the gradings of a step's worth of rows, one after the other, have failed."""
        errors = batch.columns.get("reward_error", [])
        assert isinstance(errors, list)
        for error in errors:
            self._failed = [*self._failed, str(error)] if error else []
        if len(self._failed) >= self._config.trainer.train_batch_size:
            NothingGraded.check(self._failed, f"step {self._steps}")

    @contextmanager
    def held(self, batch: TensorBatch) -> Iterator[None]:
        """Keep the rows of `batch` while the block runs; what was not put by its end goes back, for a later claim.

        Without it they go back after `queue.lease_s`.
        """
        with self._queue.held(batch.claim):
            yield

    def put_experience_data(self, batch: TensorBatch, outputs: Mapping[str, Column] | None = None) -> None:
        """Write what `batch`'s task makes of its rows, in their order; the actor makes nothing, its rows are done with.

        Raises:
            ColumnError, LeaseError, StaleRowError: see `TransferQueue.ack`.
            TailraceError: the workers have failed.
        """
        with self._calling():
            self._experience.put_experience_data(batch, outputs or {})
        if batch.claim.task == "actor":
            self._diary.trained(batch)

    def weight_sync_notify(self, version: WeightVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send new weights to the engines, then let in the prompts that wait for them.

        `version`: how many steps of training are in them; upwards from 1. `weights`: all tensors of the model, under
        their Hugging Face names, such as `model.named_parameters()`. They are copied, and may change afterwards.

        After a WeightsTimeout or a QueueError the version has been sent, and the prompts still wait. To go on, call
        this again with the same version; its weights are not looked at, or sent, again.

        Raises:
            WeightsError: the version is not newer than the last one, or counts steps that had no rows yet; or the
                tensors cannot travel.
            WeightsTimeout: an engine has not installed them in time, where `weights.mode` waits for that.
            QueueError: the queue could not be told.
            TailraceError: the workers have failed.
        """
        with self._calling():
            if version > self._steps:
                raise WeightsError(
                    f"version {version} counts steps that were not trained: get_experience_data has given rows of "
                    f"{self._steps} so far; a version is the number of steps in the weights"
                )
            if version != self._unfinished:
                self._runtime.publish(version, weights)
                self._unfinished = version
            self._runtime.settle(version)
            self._queue.advance(version)
            self._unfinished = None
        self._diary.step(version)

    def close(self) -> None:
        """End all processes, then write the report; what has not finished is lost. Twice is harmless.

        Raises:
            TailraceError: the workers have failed, and no call has raised that yet.
            UserError: the report cannot be written.
        """
        if not self._closed:
            self._diary.close()
        self._queue.__exit__(None, None, None)
        self._runtime.close()
        try:
            self._runtime.raise_untold()
        finally:
            if not self._closed:
                self._closed = True
                write_report(Path(self._config.output_dir))
                write_trace(Path(self._config.output_dir))

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """An error in the block is told by what has caused it, where the workers have failed."""
        self._runtime.check()
        try:
            yield
        except TailraceError:
            self._runtime.check()
            raise


def _kinds(config: RunConfig, workers: Collection[str] | None) -> dict[str, PoolConfig]:
    """The pools to start, by kind."""
    if config.pipeline.placement != "separated":
        raise ConfigError(
            "pipeline.placement is colocated, and engines for a loop of your own are in processes of theirs; "
            "use pipeline.placement=separated"
        )
    known = {kind: pool for kind, pool in run_pools(config).items() if kind != "trainer"}
    kinds = list(known if workers is None else workers)
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"workers: {kind!r} is not one of {', '.join(known)}{did_you_mean(kind, known)}")
    if "rollout" not in kinds:
        raise ConfigError(f"workers: {kinds} has no 'rollout', which generates; add it")
    pools = {kind: known[kind] for kind in kinds}
    check_gpus(config, pools)
    return pools


class _PromptLine:
    """Prompts that wait to be admitted, in the order of the steps that train on them; and again those that are lost."""

    def __init__(self, queue: TransferQueue, config: RunConfig) -> None:
        self._queue = queue
        self._config = config
        self._prompts: list[Prompt] = []
        """All that were ever put: a group may be lost until its rows are acked, and only the queue hears of that."""
        self._more = asyncio.Event()

    def add(self, prompts: Sequence[Prompt]) -> None:
        """They come after all others."""
        self._prompts.extend(prompts)
        self._more.set()

    async def run(self) -> None:
        """Put each as soon as it is admitted, until the queue is closed."""
        position = 0
        with suppress(QueueClosed):
            while True:
                while position == len(self._prompts):
                    self._more.clear()
                    await self._more.wait()  # for the caller
                step = position // self._config.groups_per_step
                end = min(len(self._prompts), (step + 1) * self._config.groups_per_step)
                oldest = oldest_version(step, self._config.pipeline.max_staleness)
                with suppress(QueueTimeout):  # updates take as long as they take; who waits for these rows has a limit
                    await self._queue.put([row for k in range(position, end) for row in self._group(k, oldest)])
                    position = end

    def group_again(self, group_id: int) -> list[NewRow]:
        """The rows of a group that was admitted before, and lost."""
        return self._group(group_id, 0)

    def _group(self, position: int, not_before: WeightVersion) -> list[NewRow]:
        size, seed = self._config.algorithm.group_size, self._config.seed
        return group_rows(self._prompts[position], position, group_size=size, seed=seed, not_before=not_before)


class _Runtime:
    """What works beside the caller, in a thread with an event loop of its own."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, kinds: Mapping[str, PoolConfig], *, longest_prompt: int
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._kinds = kinds
        self._longest_prompt = longest_prompt
        self._ready: Future[QueueAddress] = Future()
        self._stop = Interrupt()
        self._failure: BaseException | None = None
        self._told = False
        # a daemon: a program that forgets to close it can end, and its processes end with it
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._log: EventLog
        self._line: _PromptLine
        self._sender: WeightSender

    def start(self) -> QueueAddress:
        """Start everything; where the queue is."""
        self._thread.start()
        try:
            return self._ready.result()  # whatever is started has a limit of its own
        except BaseException:
            self.close()
            raise

    def put(self, prompts: Sequence[Prompt]) -> None:
        """Add them to the line."""
        self._loop.call_soon_threadsafe(self._line.add, tuple(prompts))

    def tell(self, event: Event) -> None:
        """Hand on what the caller did; nobody takes it after a failure, which is told otherwise."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._emit, event)

    def now(self) -> float:
        """Seconds of the run."""
        return self._log.now()

    def publish(self, version: WeightVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send them."""
        self._sender.publish(version, weights)

    def settle(self, version: WeightVersion) -> None:
        """Wait until they are installed, where the mode says so."""
        if self._config.weights_mode == "synchronous":
            self._wait(self._sender.installed(version, timeout_s=self._config.weights.timeout_s))

    def check(self) -> None:
        """Raises what has ended it, if something has."""
        if self._failure is not None:
            self._told = True
            raise self._failure
        if self._stop.asked:
            raise ClusterError("these engines were closed; start others with init_engines")

    def raise_untold(self) -> None:
        """Raises what has ended it, unless `check` has."""
        if not self._told:
            self._told = True
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """End it. Twice is harmless."""
        self._stop.ask()
        self._thread.join(_CLOSE_LIMIT_S)
        if self._thread.is_alive():
            raise ClusterError(f"the engines have not ended within {_CLOSE_LIMIT_S:g} s")

    def _emit(self, event: Event) -> None:
        try:
            self._log.emit(event)
        except UserError as error:  # it cannot be written: the next call tells
            self._failure = self._failure or error

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """For `work`, which has a limit, in the loop."""
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError:  # the loop has ended
            raise QueueClosed("the engines have ended") from None

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass  # it was closed
        except BaseException as error:  # whatever it is: the caller hears of it
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
        if "reward" in self._kinds:
            await check_answers(config.rewards, self._inputs.prompts.by_source)
        cluster = await stack.enter_async_context(make_cluster(config.cluster, self._kinds))
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
                self._kinds,
                cluster,
                queue,
                directory.checkpoints,
                log,
                DeathBudget(config.cluster.max_deaths),
                longest_prompt=self._longest_prompt,
            )
            await stack.enter_async_context(workers)
            await workers.start(self._sender.address)
        self._line = _PromptLine(queue.queue, config)
        return queue, [*workers.services, Observer(queue.queue, log)]

    async def _serve(self, queue: TransferQueue, services: Sequence[Service]) -> None:
        """Until it is cancelled, or fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for service in services:
                    tasks.create_task(service.run())
                tasks.create_task(self._line.run())
                tasks.create_task(put_lost_groups(queue, self._line.group_again))
        except BaseExceptionGroup as errors:
            self._failure = first_error(errors)
            with suppress(UserError):  # the disk may be full, which may be what has ended it
                self._log.emit(end_event(self._log, self._failure, finished=False))
            with suppress(QueueError):  # it may have failed itself
                await queue.close()  # the caller may wait for rows, and is told why there are none
            raise self._failure from errors
