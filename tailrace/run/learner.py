"""The training side of the loop: rows become new weights, which are published before the rows are acked.

    queue ──rows of the step──▶ Actor ──apply──▶ publish(version) ──▶ ack ──▶ settle ──▶ step event

Waiting: new weights are not published while they are held, which an evaluation does until its answers are generated.

A learner runs in the process of the run, or in a worker process behind the same interface.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from copy import copy
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from safetensors import SafetensorError

from tailrace.errors import CheckpointError, NothingGraded, TrainingError, one_line
from tailrace.events import Event, EventLog
from tailrace.planning.kl_control import KlCoefficients
from tailrace.registers.events import EventKind
from tailrace.report.samples import samples_event
from tailrace.run.checkpoint import MODEL_FILE, Checkpointer, ModelState, RunState, read_model_state
from tailrace.run.recording import SampleRecorder
from tailrace.run.signal_check import SignalCheck
from tailrace.run.step_metrics import response_tokens, step_metrics, update_metrics
from tailrace.tasks.actor import Actor, Batch, StepResult, uninterrupted
from tailrace.trainer.base import Trainer
from tailrace.transfer.queue.base import Row
from tailrace.types import WeightVersion

T = TypeVar("T")


class Publisher(Protocol):
    """The receiver of new weights."""

    async def publish(self, version: WeightVersion) -> None:
        """Hand the trainer's weights to the engines as `version`. They may change once this returns."""

    async def settle(self, version: WeightVersion) -> None:
        """Wait until the engines have `version`, where training is to wait for that."""


class Learner(ABC):
    """Trains step by step. Calls during a step wait: no checkpoint is of the middle of a step."""

    @property
    @abstractmethod
    def trained_steps(self) -> int:
        """Number of steps whose update is in the weights; also the version of the weights."""

    @property
    @abstractmethod
    def kl_coefficient(self) -> float:
        """The coefficient of the KL penalty that the trained steps have led to; 0 where it is not adaptive."""

    @abstractmethod
    async def train(self, step: int) -> None:
        """Train on the rows of `step` and publish the new weights.

        When it is cancelled before the step's first optimizer step, nothing changes. When it is cancelled later, it
        finishes first, but does not wait until engines have the weights.
        """

    @abstractmethod
    async def hold(self) -> None:
        """Publish no new weights until `release`. A step that has made some waits; one that is cancelled does not."""

    @abstractmethod
    async def release(self) -> None:
        """Publish weights again. Calling it twice is harmless."""

    @abstractmethod
    async def save(self, next_step: int, staged: Path | None = None) -> None:
        """Write a checkpoint of this moment. `next_step`: see `RunState`; `staged`: see `Checkpointer.save`.

        Raises:
            CheckpointError: it cannot be written; or a step failed in the middle of its update, so that the weights
                are of no step. The checkpoint before is unchanged.
        """

    @abstractmethod
    async def restore(self, checkpoint: Path, state: RunState) -> None:
        """Go on from a verified checkpoint whose rows are in the queue, and publish its weights.

        Raises:
            CheckpointError: it does not belong to this model.
        """

    @abstractmethod
    async def export(self, directory: Path) -> None:
        """See `Trainer.export`."""

    @abstractmethod
    async def evidence(self) -> dict[str, Any]:
        """See `Trainer.evidence`."""


class ModelLearner(ABC):
    """Trains a model other than the policy, such as a critic: on the same steps, beside the policy's learner."""

    @abstractmethod
    async def evidence(self) -> dict[str, Any]:
        """See `Trainer.evidence`."""

    @abstractmethod
    async def train(self, step: int) -> None:
        """Train on the rows of every step up to `step` that the model has not seen. Cancelling: see `Learner.train`."""

    @abstractmethod
    async def save(self, directory: Path) -> None:
        """Write the model's present state into a directory that does not exist yet.

        Raises:
            CheckpointError: it cannot be written, or the weights are of no step.
        """

    @abstractmethod
    async def restore(self, directory: Path) -> None:
        """Go on from the state that `save` wrote.

        Raises:
            CheckpointError: it is missing, or does not belong to this model.
        """


class LocalModelLearner(ModelLearner):
    """A `ModelLearner` in this process."""

    def __init__(self, actor: Actor, trainer: Trainer, executor: Executor) -> None:
        """`executor`: the thread of the trainer's device."""
        self._actor = actor
        self._trainer = trainer
        self._executor = executor
        self._trained_steps = 0
        self._turn = asyncio.Lock()

    async def evidence(self) -> dict[str, Any]:
        """See `ModelLearner`."""
        return self._trainer.evidence()

    async def train(self, step: int) -> None:
        """See `ModelLearner`."""
        async with self._turn:
            # a model that an interrupt left one step behind the policy catches up; one that is ahead has nothing to do
            for due in range(self._trained_steps, step + 1):
                async with self._actor.batch(due) as batch:
                    await uninterrupted(self._update(batch))

    async def save(self, directory: Path) -> None:
        """See `ModelLearner`."""
        async with self._turn:
            _check_whole(self._actor, self._trained_steps)
            state = ModelState(trained_steps=self._trained_steps, unacked=sorted(self._actor.unacked))
            loop = asyncio.get_running_loop()
            try:
                directory.mkdir(parents=True)
                await loop.run_in_executor(self._executor, lambda: self._trainer.save(directory))
                (directory / MODEL_FILE).write_bytes(msgspec.json.encode(state))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{directory} cannot be written: {error}") from error

    async def restore(self, directory: Path) -> None:
        """See `ModelLearner`."""
        async with self._turn:
            state = read_model_state(directory)
            await asyncio.get_running_loop().run_in_executor(self._executor, lambda: self._trainer.load(directory))
            self._trained_steps = state.trained_steps
            self._actor.unacked.update(state.unacked)

    async def _update(self, batch: Batch) -> None:
        await self._actor.apply(batch)
        self._trained_steps = batch.step + 1
        await self._actor.ack(batch)


def _check_whole(actor: Actor, trained_steps: int) -> None:
    """Raise a CheckpointError where the weights are in the middle of a step."""
    if actor.torn_by is not None:
        raise CheckpointError(
            f"nothing is saved, since step {trained_steps + 1} has failed in the middle of its update "
            f"({one_line(actor.torn_by)}); go on from the checkpoint before"
        )


class LocalLearner(Learner):
    """A `Learner` in this process."""

    def __init__(
        self,
        actor: Actor,
        trainer: Trainer,
        executor: Executor,
        publisher: Publisher,
        checkpointer: Checkpointer,
        log: EventLog,
        *,
        export_dtype: torch.dtype | None = None,
        run_log: EventLog | None = None,
        recorder: SampleRecorder | None = None,
        check: SignalCheck | None = None,
        tell: Callable[[], None] | None = None,
        kl: KlCoefficients | None = None,
    ) -> None:
        """`executor`: the thread of the trainer's device. `export_dtype`: see `Trainer.export`.

        `run_log`: takes the events of whole steps; by default `log`, which takes those of work. `recorder`: makes the
        samples that people look at; without it, none are kept. `check`: checks each step, if given. `tell`: emits
        the events about this process; it is called at the end of each step, before the event of the step. `kl`: the
        coefficients of an adaptive KL penalty.
        """
        self._kl = kl
        self._tell_of_process = tell
        self._check = check or SignalCheck()
        self._warned = False
        """Whether the last step gave a warning."""
        self._trained_steps = 0
        self._turn = asyncio.Lock()
        """Held during a step or a call: a cancelled step may still run when the next call comes."""
        self._released = asyncio.Event()
        """Whether weights may be published."""
        self._released.set()
        self._actor = actor
        self._trainer = trainer
        self._executor = executor
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._log = log
        self._export_dtype = export_dtype
        self._recorder = recorder
        self._run_log = run_log or log

    @property
    def trained_steps(self) -> int:
        """See `Learner`."""
        return self._trained_steps

    @property
    def kl_coefficient(self) -> float:
        """See `Learner`."""
        return 0.0 if self._kl is None else self._kl.newest

    async def train(self, step: int) -> None:
        """See `Learner`."""
        async with self._turn:
            start = self._log.now()
            result: list[StepResult] = []
            try:
                async with self._actor.batch(step) as batch:
                    await uninterrupted(self._update(batch, result), hurry=self._released.set)
                await self._publisher.settle(self._trained_steps)
            except NothingGraded:
                self._tell_samples(step, self._actor.ungraded)
                raise
            finally:
                event = self._tell(step, start, result[0]) if result else None  # also after a later error
            assert event is not None, "a step that ends well has been published"
            self._judge(step, event)

    async def _update(self, batch: Batch, published: list[StepResult]) -> None:
        """Train and publish, then ack the rows. The result is appended to `published` between the two."""
        result = await self._actor.apply(batch)
        self._trained_steps = batch.step + 1
        if self._kl is not None:
            self._kl.step_ended(update_metrics(result.updates).get("ref_kl", math.nan))
        await self._until_released()
        await self._publisher.publish(self._trained_steps)
        published.append(result)
        await self._actor.ack(batch)

    async def _until_released(self) -> None:
        if not self._released.is_set():
            with self._log.span(EventKind.EVALUATION_WAIT, "trainer", version=self._trained_steps):
                await self._released.wait()

    async def hold(self) -> None:
        """See `Learner`."""
        self._released.clear()

    async def release(self) -> None:
        """See `Learner`."""
        self._released.set()

    async def save(self, next_step: int, staged: Path | None = None) -> None:
        """See `Learner`."""
        async with self._turn:
            _check_whole(self._actor, self._trained_steps)
            coefficients = [] if self._kl is None else self._kl.saved()
            await self._checkpointer.save(self._trained_steps, next_step, self._actor.unacked, staged, coefficients)

    async def restore(self, checkpoint: Path, state: RunState) -> None:
        """See `Learner`."""
        async with self._turn:
            await self._compute(lambda: self._trainer.load(checkpoint))
            self._trained_steps = state.trained_steps
            self._actor.unacked.update(state.unacked)
            if self._kl is not None:
                self._kl.restore(state.trained_steps, state.kl_coefficients)
            await self._publisher.publish(self._trained_steps)  # engines take it when they begin to serve

    async def export(self, directory: Path) -> None:
        """See `Learner`."""
        async with self._turn:
            with self._log.span(
                EventKind.EXPORT, "trainer", version=self._trained_steps, info={"path": str(directory)}
            ):
                await self._compute(lambda: self._trainer.export(directory, dtype=self._export_dtype))

    async def evidence(self) -> dict[str, Any]:
        """See `Learner`."""
        return self._trainer.evidence()

    def _judge(self, step: int, event: Event) -> None:
        """Check a step's figures: warn once until they are right again, or end the run.

        Raises:
            TrainingError: they say that training is wrong.
        """
        if (error := self._check.error(step, event.metrics)) is not None:
            raise TrainingError(error)
        warning = self._check.warning(step, event.metrics)
        if warning is not None and not self._warned:
            info = {"kind": "on_policy_mismatch", "text": warning}
            self._run_log.emit(
                Event(task=EventKind.WARNING, actor="driver", start=event.end, end=event.end, step=step, info=info)
            )
        self._warned = warning is not None

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _tell(self, step: int, start: float, result: StepResult) -> Event:
        """Write the step's event. Returns a copy with all its figures: those that are no numbers are not written."""
        event = self._step_event(step, start, result)
        whole = copy(event)
        if self._tell_of_process is not None:
            self._tell_of_process()
        self._tell_samples(step, result.rows)
        self._run_log.emit(event)
        return whole

    def _tell_samples(self, step: int, rows: tuple[Row, ...]) -> None:
        if samples := self._recorder.of_step(rows, step) if self._recorder else []:
            self._run_log.emit(samples_event(samples, actor="driver", time=self._log.now(), step=step))

    def _step_event(self, step: int, start: float, result: StepResult) -> Event:
        end = self._log.now()
        return Event(
            task=EventKind.STEP,
            actor="driver",
            start=start,
            end=end,
            step=step,
            version=step,
            samples=len(result.rows),
            tokens=sum(response_tokens(row) for row in result.rows),
            metrics=step_metrics(result, step, end - start),
        )
