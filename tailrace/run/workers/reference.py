"""The reference worker: log-probabilities of the initial weights, which it keeps."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tailrace.cluster.base import WorkerContext
from tailrace.run.parts import make_run_trainer, reference_log_probs
from tailrace.run.workers.base import RunWorker
from tailrace.tasks.reference import ReferenceTask


class ReferenceHost(RunWorker):
    """Computes `ref_log_probs`."""

    actor = "reference"

    async def start(self) -> dict[str, Any]:
        """Load the initial weights."""
        loop = asyncio.get_running_loop()
        self._trainer = await loop.run_in_executor(
            self.executor, lambda: make_run_trainer(self.config, self.model_dir, reference=True)
        )
        return {}

    def services(self) -> Sequence[Any]:
        """Reference."""
        log_probs = reference_log_probs(self._trainer, self.executor)
        samples = self.config.trainer.train_batch_size
        return (ReferenceTask(self.queue, self.log, log_probs, samples_per_step=samples),)


def make(settings: bytes, context: WorkerContext) -> ReferenceHost:
    """For `WorkerSpec.factory`."""
    return ReferenceHost(settings, context)
