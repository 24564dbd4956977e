"""The trainer worker: it updates the weights when the driver's loop says so, and sends them to the engines.

driver ──train(step)──▶ LocalLearner ──claims, acks──▶ queue
                             └──publish──▶ WeightSender ──▶ rollout workers
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace.events import EventLog
from tailrace.registers.events import EventKind
from tailrace.run.checkpoint import RunState
from tailrace.run.parts import make_learner
from tailrace.run.workers.base import RunWorker, UntilClosed
from tailrace.run.workers.weights import make_sender
from tailrace.tasks.base import Service
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.trainer.factory import make_run_trainer
from tailrace.transfer.weights.address import WeightsAddress
from tailrace.types import WeightVersion


class TrainerWorker(RunWorker):
    """Trains the policy; its commands are those of `Learner`."""

    async def start(self) -> None:
        """Load the trainer and prepare to send weights."""
        config = self.config
        context = self.context
        sender = make_sender(config, address=context.address, datacentre=context.datacentre, log=self.log)
        self._sender = self.stack.enter_context(sender)
        loop = asyncio.get_running_loop()
        self._trainer = await loop.run_in_executor(self.executor, lambda: make_run_trainer(config, self.model_dir))
        await loop.run_in_executor(self.executor, lambda: self._sender.reserve(self._trainer.weights()))
        self._learner = make_learner(
            self.tasks,
            self.algorithm,
            self._trainer,
            self,
            CheckpointStore(Path(self.settings.checkpoints), config.checkpoint.keep, config.checkpoint.keep_best),
            prompts=self.settings.prompts,
            run_log=EventLog(sinks=(self.context.emit,), origin=self.settings.origin),
            tell=self.tell,
        )

    def services(self) -> Sequence[Service]:
        """A service that waits until the queue is closed; the driver says when to train."""
        return (UntilClosed(self.queue),)

    async def weights_address(self) -> WeightsAddress:
        """The address from which rollout workers get new weights. A command and no fact, since it holds a token."""
        return self._sender.address

    async def publish(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        loop = asyncio.get_running_loop()
        executor = self.executor.during("weight_transfer")
        await loop.run_in_executor(executor, lambda: self._sender.publish(version, self._trainer.weights()))

    async def settle(self, version: WeightVersion) -> None:
        """Wait for every engine where the update is synchronous; see `Publisher`."""
        if self.config.weights_mode == "synchronous":
            with self.activity.waiting("weights"), self.log.span(EventKind.WEIGHTS_WAIT, "trainer", version=version):
                await self._sender.installed(version, timeout_s=self.config.weights.timeout_s)

    async def train(self, step: int) -> tuple[int, float]:
        """Train on the rows of `step`; see `Learner`. Returns the number of trained steps, and the KL coefficient."""
        await self._learner.train(step)
        return self._learner.trained_steps, self._learner.kl_coefficient

    async def hold(self) -> None:
        """See `Learner`."""
        await self._learner.hold()

    async def release(self) -> None:
        """See `Learner`."""
        await self._learner.release()

    async def save(self, next_step: int, staged: str | None) -> None:
        """See `Learner`."""
        with self.activity.busy():
            await self._learner.save(next_step, None if staged is None else Path(staged))

    async def restore(self, checkpoint: str, state: RunState) -> None:
        """See `Learner`."""
        await self._learner.restore(Path(checkpoint), state)

    async def export(self, directory: str) -> None:
        """See `Learner`."""
        await self._learner.export(Path(directory))

    async def evidence(self) -> dict[str, Any]:
        """See `Learner`."""
        return await self._learner.evidence()
