"""The worker of a model other than the policy: it trains when the driver's loop says so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace.run.parts import make_model_learner
from tailrace.run.workers.base import RunWorker, UntilClosed
from tailrace.tasks.base import Service


class ModelWorker(RunWorker):
    """Trains such a model; its commands are those of `ModelLearner`."""

    async def start(self) -> None:
        """Make the model's trainer."""
        ((task, work),) = (
            (task, work) for task, work in self.algorithm.other_models() if task.pool == self.settings.pool
        )
        self._learner = await make_model_learner(task, work, self.tasks)

    def services(self) -> Sequence[Service]:
        """A service that waits until the queue is closed; the driver says when to train."""
        return (UntilClosed(self.queue),)

    async def evidence(self) -> dict[str, Any]:
        """See `ModelLearner`."""
        return await self._learner.evidence()

    async def train(self, step: int) -> None:
        """See `ModelLearner`."""
        await self._learner.train(step)

    async def save(self, directory: str) -> None:
        """See `ModelLearner`."""
        with self.activity.busy():
            await self._learner.save(Path(directory))

    async def restore(self, directory: str) -> None:
        """See `ModelLearner`."""
        await self._learner.restore(Path(directory))
