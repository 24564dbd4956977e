"""What the tasks of one pool are made with, in whichever process they are."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.activity import Activity
from tailrace.config.run import RunConfig
from tailrace.events import EventLog
from tailrace.rewards.pool import GraderPool
from tailrace.tasks.gate import WeightsGate
from tailrace.transfer.queue.base import TransferQueue
from tailrace.types import FloatArray

if TYPE_CHECKING:
    from tailrace.engine.base import Engine
    from tailrace.trainer.base import Trainer, TrainSample
    from tailrace.trainer.scorer import Scorer

Decode = Callable[[list[int]], str]
"""Turns the token ids of a response into its text."""

Score = Callable[[Sequence["TrainSample"]], Awaitable[list[FloatArray]]]
"""Computes a value for each response token of each sample, [R], such as its log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a task of work `Generate` has beside the rest."""

    engine: "Engine"
    decode: Decode
    gate: WeightsGate | None = None
    """None: the engine always has the weights that its prompts wait for."""
    room: int | None = None
    """The most rows that are in hand, but never less than a group; None leaves the limit to the queue's capacity."""


@dataclass(slots=True, kw_only=True)
class TaskContext:
    """Of one pool. What several tasks share is made at its first use, and closed by `stack`."""

    config: RunConfig
    model_dir: Path
    """Of the initial weights, a Hugging Face directory."""
    queue: TransferQueue
    log: EventLog
    activity: Activity
    """Where the time of the pool's worker goes."""
    executor: Executor
    """Of the device: one thread, whose work counts as busy."""
    stack: AsyncExitStack
    """Closed with the process, or the run."""
    generation: Generation | None = None
    graders: GraderPool | None = None
    frozen: "Scorer | None" = None
    """Has the initial weights."""
    trainers: "dict[str, Trainer]" = field(default_factory=dict)
    """By task: those of other models than the policy that are trained here."""

    @property
    def samples_per_step(self) -> int:
        """Rows of a training step."""
        return self.config.trainer.train_batch_size

    async def grader_pool(self) -> GraderPool:
        """The grading processes of the recipe's grader."""
        if self.graders is None:
            self.graders = await self.stack.enter_async_context(GraderPool(self.config.rewards))
        return self.graders

    async def scorer(self, of: str | None) -> Score:
        """What the model that task `of` trains says of tokens; None: log-probabilities under the initial weights."""
        loop = asyncio.get_running_loop()
        if of is None and self.frozen is None:
            self.frozen = await loop.run_in_executor(self.executor, self._load_frozen)
        scorer = self.frozen if of is None else self.trainers[of]
        assert scorer is not None

        async def score(samples: "Sequence[TrainSample]") -> list[FloatArray]:
            return await loop.run_in_executor(self.executor, lambda: scorer.log_probs(samples))

        return score

    def _load_frozen(self) -> "Scorer":
        from tailrace.trainer.factory import make_run_scorer  # seconds: only where something is scored

        return make_run_scorer(self.config, self.model_dir)
