"""The context from which the tasks of one pool are made, in any process."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.activity import Activity, TimedExecutor
from tailrace.config.run import RunConfig
from tailrace.events import EventLog
from tailrace.rewards.pool import GraderPool
from tailrace.tasks.memory import MemoryUse
from tailrace.transfer.queue.base import TransferQueue
from tailrace.types import FloatArray

if TYPE_CHECKING:
    from tailrace.trainer.base import Trainer, TrainSample
    from tailrace.trainer.scorer import Scorer

Decode = Callable[[list[int]], str]
"""Turns the token ids of a response into its text."""

Score = Callable[[Sequence["TrainSample"]], Awaitable[list[FloatArray]]]
"""Computes a value for each response token of each sample, [R], such as its log-probability."""


@dataclass(slots=True, kw_only=True)
class TaskContext:
    """The context of one pool. Parts that several tasks share are made at their first use; `stack` closes them."""

    config: RunConfig
    model_dir: Path
    """Directory of the initial weights, in Hugging Face format."""
    queue: TransferQueue
    log: EventLog
    activity: Activity
    """Measures the time of the pool's worker."""
    memory: MemoryUse
    """Measures the memory of the process."""
    executor: TimedExecutor
    """The one thread of the device; its work counts as busy."""
    stack: AsyncExitStack
    """Closed with the process or the run."""
    graders: dict[str, GraderPool] = field(default_factory=dict)
    """The grading processes that have been started, by the name of the reward; see `RewardsConfig.each`."""
    frozen: "Scorer | None" = None
    """A scorer with the initial weights."""
    trainers: "dict[str, Trainer]" = field(default_factory=dict)
    """The trainers of models other than the policy that are trained here, by task."""

    @property
    def samples_per_step(self) -> int:
        """Number of rows of a training step."""
        return self.config.trainer.train_batch_size

    async def grader_pool(self, reward: str) -> GraderPool:
        """The grading processes of a reward, started at the first call. `reward`: see `RewardsConfig.each`."""
        if reward not in self.graders:
            pool = GraderPool(self.config.rewards.each[reward], reward)
            self.graders[reward] = await self.stack.enter_async_context(pool)
        return self.graders[reward]

    async def scorer(self, of: str | None) -> Score:
        """The scoring function of the model that task `of` trains; None: log-probabilities of the initial weights."""
        loop = asyncio.get_running_loop()
        if of is None and self.frozen is None:
            self.frozen = await loop.run_in_executor(self.executor, self._load_frozen)
            self.memory.add(self.frozen.memory)
        scorer = self.frozen if of is None else self.trainers[of]
        assert scorer is not None

        device = self.executor.during("reference" if of is None else "update")  # trainers tell it as a part of that

        async def score(samples: "Sequence[TrainSample]") -> list[FloatArray]:
            return await loop.run_in_executor(device, lambda: scorer.log_probs(samples))

        return score

    def _load_frozen(self) -> "Scorer":
        from tailrace.trainer.factory import make_run_scorer  # slow: only where something is scored

        return make_run_scorer(self.config, self.model_dir)
