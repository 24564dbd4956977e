"""The main loop of a run.

    prompts ─▶ rollout ─▶ reward ─▶ (reference) ─▶ advantage ─▶ actor ─▶ weights ─▶ engine
       ▲                                                                              │
       └────────────── the next step's prompts, once its weights are there ◀──────────┘

Every arrow but the last is the transfer queue. The tasks between prompts and actor run all the time, each taking what
is ready; the loop below only admits prompts, updates the actor and hands its weights on.

    who         waits for
    prompts     the previous step's weights in the engine; room in the queue
    lost rows   the end of a storage unit that had them; then, to be put again, room in the queue
    rollout     prompts; blocks of the KV cache (inside the engine)
    reward      responses; a free grading process
    advantage   the rewards of a whole group
    actor       synchronous: the whole batch; streaming: a micro-batch's worth of whole groups
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from tailrace.checkpointing import Checkpointer, RunState
from tailrace.engine.base import Engine
from tailrace.errors import QueueClosed, QueueTimeout
from tailrace.evaluation import Evaluator
from tailrace.events import Event, EventLog
from tailrace.metrics import TaskTimes, response_tokens, step_metrics
from tailrace.rollout.feeder import PromptFeeder
from tailrace.trainer.actor import Actor, StepResult
from tailrace.trainer.base import Trainer
from tailrace.transfer.queue.base import TransferQueue


class Service(Protocol):
    """A task that serves until the queue is closed."""

    async def run(self) -> None:
        """Serve until the queue is closed."""


class Pipeline:
    """Trains from `trained_steps` to `steps`."""

    def __init__(
        self,
        *,
        steps: int,
        evaluate_every: int,
        queue: TransferQueue,
        services: Sequence[Service],
        feeder: PromptFeeder,
        actor: Actor,
        trainer: Trainer,
        engine: Engine,
        evaluator: Evaluator | None,
        checkpointer: Checkpointer,
        times: TaskTimes,
        log: EventLog,
    ) -> None:
        self.trained_steps = 0
        """Steps whose update is in the weights; also the version of the weights."""
        self._steps = steps
        self._evaluate_every = evaluate_every
        self._queue = queue
        self._services = services
        self._feeder = feeder
        self._actor = actor
        self._trainer = trainer
        self._engine = engine
        self._evaluator = evaluator
        self._checkpointer = checkpointer
        self._times = times
        self._log = log

    async def run(self) -> None:
        """Train to the end. An error of any task stops all of them and is raised (in an ExceptionGroup)."""
        async with asyncio.TaskGroup() as tasks:
            for service in self._services:
                tasks.create_task(service.run())
            tasks.create_task(self._put_lost_groups())
            while self.trained_steps < self._steps:
                await self._evaluate_if(self.trained_steps % self._evaluate_every == 0)
                await self._train_step(self.trained_steps)
                await self._save_if(self._checkpointer.due(self.trained_steps, self._steps))
            await self._evaluate_if(True)
            await self._queue.close()

    async def _put_lost_groups(self) -> None:
        """Until the queue is closed, put groups again whose rows were lost with a storage unit."""
        with suppress(QueueClosed):
            while True:
                try:
                    groups = await self._queue.lost_groups()
                except QueueTimeout:
                    continue  # all is well: nothing was lost for that long
                await self._feeder.put_again(groups)

    async def _train_step(self, step: int) -> None:
        self._times.take()
        start = self._log.now()

        async def finish(result: StepResult) -> None:
            self.trained_steps += 1
            await self._update_weights()
            self._log.emit(self._step_event(step, start, result))

        await self._feeder.put(step)
        await self._actor.update(step, on_commit=finish)

    def _step_event(self, step: int, start: float, result: StepResult) -> Event:
        end = self._log.now()
        return Event(
            task="step",
            actor="driver",
            start=start,
            end=end,
            step=step,
            version=step,
            samples=len(result.rows),
            tokens=sum(response_tokens(row) for row in result.rows),
            metrics={**step_metrics(result, end - start), **self._times.take()},
        )

    async def resume_at(self, state: RunState) -> None:
        """Go on where a restored trainer and queue stand."""
        self.trained_steps = state.trained_steps
        self._feeder.resume_at(state.next_step)
        self._actor.unacked.update(state.unacked)
        await self._update_weights()

    async def _update_weights(self) -> None:
        """Give the engine the trainer's weights, and let in the prompts that wait for them."""
        with self._log.span("update_weights", "engine", version=self.trained_steps):
            await self._engine.update_weights(self.trained_steps, self._trainer.weights())
        await self._queue.advance(self.trained_steps)

    async def _evaluate_if(self, due: bool) -> None:
        if due and self._evaluator is not None:
            await self._evaluator.run(self.trained_steps)

    async def _save_if(self, due: bool) -> None:
        if due:
            await self.save()

    async def save(self) -> None:
        """Write a checkpoint of this moment."""
        await self._checkpointer.save(self.trained_steps, self._feeder.next_step, self._actor.unacked)
