"""The reward worker: grades responses in processes of its own, and computes the advantages of whole groups."""

from collections.abc import Sequence
from typing import Any

from tailrace.algorithms.factory import make_algorithm
from tailrace.cluster.base import WorkerContext
from tailrace.rewards.pool import GraderPool
from tailrace.run.workers.base import RunWorker
from tailrace.tasks.advantage import AdvantageTask
from tailrace.tasks.reward import RewardTask


class RewardHost(RunWorker):
    """Grades."""

    actor = "reward"
    uses_device = False

    async def start(self) -> dict[str, Any]:
        """Start the grading processes."""
        self._pool = await self.stack.enter_async_context(GraderPool(self.config.rewards))
        return {}

    def services(self) -> Sequence[Any]:
        """Reward and advantage."""
        samples = self.config.trainer.train_batch_size
        algorithm = make_algorithm(self.config.algorithm)
        return (
            RewardTask(
                self.queue, self.log, self._pool, self.config.rewards, samples_per_step=samples, activity=self.activity
            ),
            AdvantageTask(self.queue, self.log, algorithm, samples_per_step=samples, activity=self.activity),
        )


def make(settings: bytes, context: WorkerContext) -> RewardHost:
    """For `WorkerSpec.factory`."""
    return RewardHost(settings, context)
