"""The actor task: rows with advantages become an update of the weights.

    queue ──claim whole groups──▶ accumulate … accumulate ──▶ apply ──▶ (weights are published) ──▶ ack

Waiting: without streaming, the first claim waits for the whole batch. With streaming, each claim is a micro-batch that
is complete while the rest still generates.

Rows are acked after the optimizer step that used them and not before. So an update that is interrupted leaves them in
the queue, and every row is trained on exactly once. Between that step and its ack a row may come again: because the ack
failed, because the row was lost with a storage unit (and made again with its group), or because its lease ended. Such a
row is not trained on again, only acked.

The actor claims for all ranks of the trainer and hands it whole claims; the trainer shares their samples among its
ranks.

With several optimizer steps a training step, the ratio of the loss needs the log-probabilities of the weights at its
start. They are computed for each claim as it comes. The optimizer steps follow when the whole batch is there, in the
order of the prompts: the groups that are complete first are mostly short ones.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np

from tailrace.activity import Activity
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.errors import AlgorithmError, NonFiniteError, NothingGraded
from tailrace.events import EventLog
from tailrace.host.user_code import describe
from tailrace.registers.events import EventKind
from tailrace.trainer.base import Loss, Trainer, TrainSample, UpdateResult
from tailrace.transfer.queue.adapters.dataloader import StreamingLoader
from tailrace.transfer.queue.base import Claim, Row, TransferQueue
from tailrace.transfer.queue.holding import ack_if_held, holding
from tailrace.types import FloatArray, Value, WeightVersion

T = TypeVar("T")

POLICY_ROW = "trainer"
"""The line in the timeline of the task that trains the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The rows of one training step and the results of its updates."""

    rows: tuple[Row, ...]
    """The rows, in the order of their prompts."""
    updates: tuple[UpdateResult, ...]


@dataclass(slots=True)
class Batch:
    """The rows that one training step works on."""

    step: int
    claims: list[Claim] = field(default_factory=list)
    """All claims, including rows that are not trained on again: each claim is acked in the end."""
    rows: dict[int, Row] = field(default_factory=dict)
    """The rows to train on, by `order`."""
    samples: dict[int, TrainSample] = field(default_factory=dict)
    """With several optimizer steps, the samples that are still to be accumulated, by `order`."""

    def check_graded(self) -> None:
        """Raise NothingGraded where all gradings have failed."""
        errors = [str(row.cells.get("reward_error", "")) for row in self.rows.values()]
        NothingGraded.check(errors, f"step {self.step + 1}")

    @property
    def in_order(self) -> tuple[Row, ...]:
        """The rows to train on, in the order of their prompts."""
        return tuple(sorted(self.rows.values(), key=lambda row: row.order))


class Actor:
    """Trains on each row of a step exactly once.

        async with actor.batch(step) as batch:
            result = await actor.apply(batch)  # the weights have changed
            await actor.ack(batch)             # the rows do not come again

    The time between the first optimizer step and the ack must not be cancelled; see `uninterrupted`.
    """

    def __init__(
        self,
        queue: TransferQueue,
        trainer: Trainer,
        task: str,
        loss: Loss,
        executor: Executor,
        log: EventLog,
        activity: Activity,
        *,
        batch_size: int,
        mini_batch_size: int,
        epochs: int = 1,
        row: str = POLICY_ROW,
    ) -> None:
        """`task`: its name in the table; `loss`: the task's. `executor`: the thread of the trainer's device.

        `activity`: that of the pool's worker. `batch_size`: samples of a training step. `mini_batch_size`: samples of
        an optimizer step. `epochs`: how often a step goes through its samples. `row`: the line in the timeline.
        """
        self.unacked: set[int] = set()
        """Rows that are in the weights and that the queue may hand out again, by `order`."""
        self.torn_by: BaseException | None = None
        """The error that has ended a step in the middle of its update. The weights are of no step then."""
        self.ungraded: tuple[Row, ...] = ()
        """The rows of a step that ended because all their gradings had failed."""
        self._queue = queue
        self._trainer = trainer
        self._task = task
        self._loss = checked(loss)
        self._executor = executor
        self._log = log
        self._activity = activity
        self._batch_size = batch_size
        self._mini_batch_size = mini_batch_size
        self._epochs = epochs
        self._row = row

    @asynccontextmanager
    async def batch(self, step: int) -> AsyncIterator[Batch]:
        """Claim all rows of one step, and accumulate them as they come. An error of the block drops the gradients.

        Raises:
            NothingGraded: all gradings of the step have failed; no weight has changed.
        """
        batch = Batch(step)
        async with holding(self._queue) as hold:
            try:
                async for rows in self._new_rows(batch, hold):
                    if self._has_several_updates:
                        batch.samples |= await self._with_old_log_probs(step, rows)
                    else:
                        await self._accumulate(step, [train_sample(row, step) for row in rows])
                batch.check_graded()
                yield batch
            except BaseException as error:
                if isinstance(error, NothingGraded):
                    self.ungraded = batch.in_order
                await self._compute(self._trainer.discard)
                raise

    @property
    def _has_several_updates(self) -> bool:
        return self._mini_batch_size < self._batch_size or self._epochs > 1

    async def apply(self, batch: Batch) -> StepResult:
        """Make the optimizer steps. From then on the rows are in the weights, and in `unacked` until they are acked.

        An error of an optimizer step, or between two, is kept in `torn_by`.
        """
        updates = await (self._optimize(batch) if self._has_several_updates else self._update(batch))
        self.unacked.update(batch.rows)
        return StepResult(rows=batch.in_order, updates=tuple(updates))

    async def ack(self, batch: Batch) -> None:
        """Ack all rows. Those that have left their claim come again, and are acked then."""
        for claim in batch.claims:
            await self._ack(claim)

    async def _update(self, batch: Batch) -> list[UpdateResult]:
        return [await self._apply(batch.step)]

    async def _optimize(self, batch: Batch) -> list[UpdateResult]:
        updates: list[UpdateResult] = []
        samples = [batch.samples[order] for order in sorted(batch.samples)]
        try:
            for start in list(range(0, len(samples), self._mini_batch_size)) * self._epochs:
                await self._accumulate(batch.step, samples[start : start + self._mini_batch_size])
                updates.append(await self._apply(batch.step))
        except BaseException as error:
            if any(update.applied for update in updates):
                self.torn_by = error
            raise
        return updates

    async def _new_rows(self, batch: Batch, hold: Callable[[Claim], None]) -> AsyncIterator[list[Row]]:
        """Claim until `batch` is full. Yields of each claim the rows that neither `batch` nor an earlier update has."""
        loader = StreamingLoader(self._queue, self._task, rows=self._batch_size)
        while (claim := await self._next(loader)) is not None:
            hold(claim)
            batch.claims.append(claim)
            new = [row for row in claim.rows if row.order not in batch.rows and row.order not in self.unacked]
            batch.rows.update({row.order: row for row in new})
            loader.claim_more(len(claim.rows) - len(new))
            if new:
                yield new

    async def _next(self, loader: StreamingLoader) -> Claim | None:
        with self._activity.waiting("data"):
            return await anext(loader, None)

    async def _with_old_log_probs(self, step: int, rows: Sequence[Row]) -> dict[int, TrainSample]:
        """Compute the samples' old log-probabilities; return the samples by `order`."""
        samples = [train_sample(row, step) for row in rows]
        values = await self._compute(lambda: self._trainer.log_probs(samples))
        return {
            row.order: replace(sample, old_log_probs=old)
            for row, sample, old in zip(rows, samples, values, strict=True)
        }

    async def _accumulate(self, step: int, samples: Sequence[TrainSample]) -> None:
        tokens = sum(len(sample.response_ids) for sample in samples)
        with self._log.span(EventKind.ACTOR, self._row, step=step, version=step, samples=len(samples), tokens=tokens):
            await self._compute(lambda: self._trainer.accumulate(samples, self._loss))

    async def _apply(self, step: int) -> UpdateResult:
        try:
            with self._log.span(EventKind.OPTIMIZER, self._row, step=step, version=step) as span:
                result = await self._compute(self._trainer.apply)
                span.metrics = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
                if self._row != POLICY_ROW:  # those of the policy are in the event of its step
                    span.metrics |= result.metrics
        except NonFiniteError:  # raised in place of the optimizer step: no weight has changed
            raise
        except BaseException as error:  # after any other error some weights may have changed, or all
            self.torn_by = error
            raise
        return result

    async def _ack(self, claim: Claim) -> None:
        """Ack rows that are in the weights now. Those that have left the claim come again."""
        if await ack_if_held(self._queue, claim, {row.id: {} for row in claim.rows}):
            self.unacked.difference_update(row.order for row in claim.rows)
            return
        for row in claim.rows:
            if await ack_if_held(self._queue, claim, {row.id: {}}):
                self.unacked.discard(row.order)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


async def uninterrupted(work: Awaitable[T], hurry: Callable[[], None] = lambda: None) -> T:
    """Await `work` to its end even when cancelled meanwhile, once or repeatedly.

    Then raise the error of `work`, or else the cancellation. `hurry`: called at the first cancellation.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        hurry()
        while not task.done():
            with suppress(asyncio.CancelledError):  # the first cancellation is raised below
                await asyncio.wait([task])
        task.result()
        raise


def checked(loss: Loss) -> Loss:
    """Wrap a loss: an exception of it, or a missing metric in its result, becomes an AlgorithmError."""

    def checked_loss(inputs: LossInputs) -> LossOutput:
        try:
            output = loss(inputs)
        except Exception as error:  # the code of an algorithm may raise anything
            raise AlgorithmError(f"the loss of the algorithm has failed: {describe(error)}") from error
        if not isinstance(output, LossOutput):
            raise AlgorithmError(
                f"the loss of the algorithm returned a {type(output).__name__}; it must return a "
                "tailrace.algorithms.loss_inputs.LossOutput"
            )
        if "tokens" not in output.metrics:
            raise AlgorithmError(
                "the loss of the algorithm returned no metric 'tokens', the sum of its mask, which its other metrics "
                "are divided by; add it"
            )
        return output

    return checked_loss


def is_floats(cell: Value) -> TypeGuard[FloatArray]:
    """Whether `cell` is of a column of floats."""
    return isinstance(cell, np.ndarray) and cell.dtype == np.float32


def train_sample(row: Row, version: WeightVersion | None = None) -> TrainSample:
    """The trainer's view of a row, for a task that trains or one that scores.

    Its columns are the row's float arrays, and its `kl_coefficient` on every token. `version`: that of the weights that
    are trained.

    A row whose grading failed (its reward is NaN) is masked: it counts for nothing in the update.
    """
    cells = cast("dict[str, np.ndarray[Any, Any]]", row.cells)
    versions = cells.get("weight_versions")
    response_ids = cells["response_ids"]
    graded = not math.isnan(cast(float, row.cells.get("reward", 0.0)))
    columns = {name: cell for name, cell in row.cells.items() if is_floats(cell)}
    if (coefficient := row.cells.get("kl_coefficient")) is not None:
        columns["kl_coefficient"] = np.full(len(response_ids), cast(float, coefficient), np.float32)
    return TrainSample(
        group_id=row.group_id,
        prompt_ids=cells["prompt_ids"],
        response_ids=response_ids,
        response_mask=cells.get("response_mask", np.ones_like(response_ids)) * graded,
        columns=columns,
        on_policy=None if version is None or versions is None else bool((versions == version).all()),
    )
