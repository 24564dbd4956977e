"""Engines for a training loop of the caller's own (AsyncFlow, section 5.1).

    caller's thread                           thread `engines`, and processes
    put_prompts_data ────prompts──▶ line ──rows, as weights admit them──▶ queue ◀──▶ rollout, reward, reference
    get_experience_data ◀─────────claims───────────────────────────────── queue
    put_experience_data ──────────acks──────────────────────────────────▶ queue
    weight_sync_notify ──tensors──▶ WeightSender ───────────────────────────────────▶ rollout
                       ──version────────────────────────────────────────▶ queue: the next prompts go in

Waiting: `get_experience_data` waits for rows that the tasks before have finished, up to `queue.timeout_s`. With
`weights.mode: synchronous`, `weight_sync_notify` waits until engines have installed the weights. `put_prompts_data`
never waits: prompts that may not enter the queue yet stay in the line. Workers are started, watched and replaced as in
a run (run/separated.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tailrace.algorithms.factory import make_algorithm
from tailrace.config.cluster import ROLLOUT, PoolConfig, kind_of_pool, pool_key
from tailrace.config.run import RunConfig
from tailrace.errors import (
    ConfigError,
    NothingGraded,
    PromptError,
    TailraceError,
    WeightsError,
    did_you_mean,
)
from tailrace.host.compute import prepare_torch
from tailrace.prompts.load import tell_dropped
from tailrace.report.page import write_report
from tailrace.report.trace import write_trace
from tailrace.run.checks import check_recipe
from tailrace.run.directory import RunDirectory
from tailrace.run.loop_diary import LoopDiary
from tailrace.run.loop_runtime import LoopRuntime
from tailrace.run.parts import kl_coefficients
from tailrace.run.queue import client_options
from tailrace.run.workers.pools import run_pools
from tailrace.tasks.actor import train_sample
from tailrace.trainer.base import Loss, Trainer, TrainSample
from tailrace.trainer.factory import make_run_trainer
from tailrace.transfer.queue.adapters.experience import Experience
from tailrace.transfer.queue.adapters.tensors import Column, Layout, TensorBatch, make_cells
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.types import Prompt, WeightVersion


class Engines:
    """The workers of a recipe, without a trainer. Used from the thread that made it.

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

    A worker that dies is replaced without an error. A failure that cannot be mended (an error of a task, too many
    deaths) is raised by the waiting call, by the next call, or at last by `close`.
    """

    def __init__(
        self, config: RunConfig, *, workers: Collection[str] | None = None, prompts: bytes | None = None
    ) -> None:
        """`Trainer.init_engines` makes it and explains the arguments. `prompts`: see `train`."""
        if kl_coefficients(config) is not None:
            raise ConfigError(
                "algorithm.kl.adaptive follows the steps of a run, and these are your own; leave it out, and give your "
                "loss a coefficient that changes"
            )
        if config.rollout.http is not None:
            raise ConfigError("rollout.http serves the engines of a run, and not of a loop of your own; leave it out")
        pools = _pools(config, workers)
        directory = RunDirectory(Path(config.output_dir))
        directory.check_new()
        with directory.holding(prompts):
            self._start(config, pools)

    def _start(self, config: RunConfig, pools: dict[str, PoolConfig]) -> None:
        self._config = config
        self._inputs = check_recipe(config, pools)
        tell_dropped(self._inputs.prompts.dropped)
        self._groups = 0
        """Number of prompts that were put."""
        self._steps = 0
        """Number of steps that have rows claimed for training."""
        self._failed: list[str] = []
        """Errors of the newest rows, since the last one whose grading succeeded."""
        self._closed = False
        self._unfinished: WeightVersion | None = None
        """The version that was sent and that the queue does not know yet."""
        self._longest_prompt = max(self._inputs.longest_prompt, config.prompts.max_prompt_tokens or 0)
        self._runtime = LoopRuntime(config, self._inputs, pools, longest_prompt=self._longest_prompt)
        address = self._runtime.start()
        try:
            self._queue = SyncQueue(address, name="caller", **client_options(config.queue))
        except BaseException:
            self._runtime.close()
            raise
        self._experience = Experience(self._queue)
        self._diary = LoopDiary(config, tell=self._runtime.tell, clock=self._runtime.now)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it. An error of the block goes on, with a note of the error that `close` would have raised."""
        try:
            self.close()
        except TailraceError as failure:
            if error is None:
                raise
            error.add_note(f"meanwhile the engines have failed: {failure}")

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The recipe's prompts to train on, in the order of their source."""
        return self._inputs.prompts.train

    @property
    def held_out(self) -> tuple[Prompt, ...]:
        """The recipe's prompts that are not trained on."""
        return self._inputs.prompts.held_out

    @property
    def model_dir(self) -> Path:
        """The directory of the initial weights, for `AutoModelForCausalLM.from_pretrained`."""
        return self._inputs.model_dir

    @property
    def loss(self) -> Loss:
        """The loss of the recipe's algorithm, for `Trainer.accumulate`."""
        _, work = make_algorithm(self._config.resolved_algorithm).policy_task()
        return work.loss

    def make_trainer(self) -> Trainer:
        """Make the recipe's trainer in this process, with the initial weights. It knows nothing of the engines.

        It computes on `device`; on a CPU with as many threads as torch has in this process.

        Raises:
            UserError: it cannot be made as configured, or there is no such device.
        """
        prepare_torch(self._config.device, None)
        return make_run_trainer(self._config, self.model_dir)

    def train_samples(self, batch: TensorBatch) -> list[TrainSample]:
        """Convert the rows of a batch of the actor for `Trainer.accumulate`.

        Raises:
            ColumnError: a replaced value in `batch.columns` is not a column.
        """
        cells = make_cells(batch.columns, self._queue.columns, rows=len(batch.claim.rows))
        return [train_sample(replace(row, cells=own)) for row, own in zip(batch.claim.rows, cells, strict=True)]

    def put_prompts_data(self, prompts: Sequence[Prompt]) -> list[int]:
        """Have `algorithm.group_size` responses generated for each prompt. Returns the group_ids at once.

        Each prompt enters the queue when weights admit its step and the queue has room, in the order of the calls.

        Raises:
            PromptError: one is no `tailrace.types.Prompt`, longer than the engines were started for, or empty. Then
                none of them was put.
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
        """Claim rows of `task`, waiting until there are some. The columns are those that the task reads, as tensors.

        The actor gets rows with advantages: `count` of them in whole groups, the earliest first. With
        `pipeline.streaming` it gets fewer: a micro-batch as soon as one is complete.

        `count`: the largest number of rows; by default `trainer.train_batch_size`. `layouts`, `timeout` (seconds): see
        `Experience`.

        Raises:
            ColumnError, QueueError, QueueTimeout: see `Experience.get_experience_data`.
            NothingGraded: as many gradings as a step has samples have failed in a row.
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
        """Raise NothingGraded where as many gradings as a step has samples have failed in a row."""
        errors = batch.columns.get("reward_error", [])
        assert isinstance(errors, list)
        for error in errors:
            self._failed = [*self._failed, str(error)] if error else []
        if len(self._failed) >= self._config.trainer.train_batch_size:
            NothingGraded.check(self._failed, f"step {self._steps}")

    @contextmanager
    def held(self, batch: TensorBatch) -> Iterator[None]:
        """Keep the rows of `batch` while the block runs. Rows that were not put by its end go back, for a later claim.

        Without it they go back after `queue.lease_s`.
        """
        with self._queue.held(batch.claim):
            yield

    def put_experience_data(self, batch: TensorBatch, outputs: Mapping[str, Column] | None = None) -> None:
        """Write the outputs of `batch`'s task, in the order of its rows. The actor has none: its rows are consumed.

        Raises:
            ColumnError, LeaseError, StaleRowError: see `TransferQueue.ack`.
            TailraceError: the workers have failed.
        """
        with self._calling():
            self._experience.put_experience_data(batch, outputs or {})
        if batch.claim.task == "actor":
            self._diary.trained(batch)

    def weight_sync_notify(self, version: WeightVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send new weights to the engines, then admit the prompts that wait for them.

        `version`: the number of training steps in them, ascending from 1. `weights`: all tensors of the model, under
        their Hugging Face names, such as `model.named_parameters()`. They are copied, and may change afterwards.
        After a WeightsTimeout or a QueueError the version has been sent, and the prompts still wait. To go on, call
        this again with the same version; its weights are neither read nor sent again.

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

    def scale(self, workers: int, pool: str = ROLLOUT) -> str:
        """Have so many rollout workers in a pool from now on, and return what was done in words, when it is.

        The engines go on meanwhile; the call waits until new workers have loaded the model, each up to twice
        `cluster.start_limit_s`. The responses of one that leaves go on elsewhere. `tailrace scale` does the same from
        outside.

        Raises:
            ConfigError: there is no such pool, or no engine would be left.
            ClusterError: there is no place for so many.
            TailraceError: the workers have failed.
        """
        with self._calling():
            return self._runtime.scale(workers, pool)

    def close(self) -> None:
        """End all processes, then write the report. Unfinished rows are lost. A second call is harmless.

        Raises:
            TailraceError: the workers have failed, and no call has raised that yet.
            UserError: the report cannot be written.
        """
        with ExitStack() as stack:  # each of them, whatever the one before it raises
            stack.callback(self._runtime.close)
            stack.callback(self._queue.__exit__, None, None, None)
            if not self._closed:
                self._diary.close()
        try:
            self._runtime.raise_untold()
        finally:
            if not self._closed:
                self._closed = True
                write_report(Path(self._config.output_dir))
                write_trace(Path(self._config.output_dir))

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Replace an error of the block by its cause where the workers have failed."""
        self._runtime.check()
        try:
            yield
        except TailraceError:
            self._runtime.check()
            raise


def _pools(config: RunConfig, workers: Collection[str] | None) -> dict[str, PoolConfig]:
    """The pools to start, by name."""
    if config.pipeline.placement != "separated":
        raise ConfigError(
            "pipeline.placement is colocated, and engines for a loop of your own are in processes of theirs; "
            "use pipeline.placement=separated"
        )
    if (elastic := config.cluster.rollout.elastic) is not None:
        raise ConfigError(
            f"{pool_key(elastic)} has min_workers or max_workers, and a run chooses between them by the time of its "
            "training, which a loop of your own does; leave them out, and call scale(N)"
        )
    trained = {task.pool for task, _ in make_algorithm(config.algorithm).trained()}  # by the caller
    pools = {name: pool for name, pool in run_pools(config).items() if name not in trained}
    known = list(dict.fromkeys(map(kind_of_pool, pools)))
    kinds = known if workers is None else list(workers)
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"workers: {kind!r} is not one of {', '.join(known)}{did_you_mean(kind, known)}")
    if ROLLOUT not in kinds:
        raise ConfigError(f"workers: {kinds} has no 'rollout', which generates; add it")
    return {name: pool for name, pool in pools.items() if kind_of_pool(name) in kinds}
