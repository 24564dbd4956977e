"""The main loop of a run.

    prompts ─▶ rollout ─▶ reward ─▶ (reference) ─▶ advantage ─▶ actor ─▶ weights ─▶ engines
       ▲                                                                              │
       └───────────── prompts of later steps, as soon as weights admit them ◀─────────┘

Every arrow but the last is the transfer queue. The tasks between prompts and actor run all the time, and each takes
rows as they become ready. The loop below has the weights evaluated, admits prompts, has the actor update the weights,
and saves.

    part        waits for
    prompts     weights that are at most `max_staleness` updates older than those their step trains; room in the queue;
                with an adaptive KL penalty, the divergence of the steps that such weights were trained in
    lost rows   the end of a storage unit that held them; then room in the queue, to be put again
    rollout     prompts, and the weights that may begin them; blocks of the KV cache (inside the engine)
    reward      responses; a free grading process
    advantage   the rewards of a whole group
    actor       its step's rows: all of them, or, streaming, a micro-batch's worth of whole groups
    weights     an evaluation of the ones before, until its answers are generated
    evaluation  the end of the one before
    checkpoint  the end of the evaluation that goes on, so that a resumed run lacks none; that of a run which is
                stopped waits for no evaluation

All modes are this loop. The placement of engine and trainer is in the services and the learner. The number of steps
that prompts run ahead (max_staleness) is in the feeder. The amount that the actor waits for (streaming) is in the
queue's table.
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.errors import NonFiniteError
from tailrace.planning.lengths.base import LengthPredictor
from tailrace.run.checkpoint import MODELS, RunState, restore_lengths, save_lengths
from tailrace.run.evaluation import Evaluator
from tailrace.run.learner import Learner, ModelLearner
from tailrace.tasks.base import Service
from tailrace.tasks.prompts import PromptFeeder, put_lost_groups
from tailrace.transfer.queue.base import TransferQueue


class Pipeline:
    """Trains from the learner's present step to `steps`."""

    def __init__(
        self,
        *,
        steps: int,
        evaluate_every: int,
        save_every: int,
        queue: TransferQueue,
        services: Sequence[Service],
        feeder: PromptFeeder,
        learner: Learner,
        evaluator: Evaluator | None,
        models: Mapping[str, ModelLearner] | None = None,
        lengths: LengthPredictor | None = None,
        on_evaluation: Callable[[int, Mapping[str, float]], None] = lambda step, figures: None,
        staging: Path,
    ) -> None:
        """`models`: models other than the policy, by the task that trains them. `on_evaluation`: takes the figures of
        each evaluation, with the number of steps before it.

        `lengths`: expects the lengths of responses; what it learns is saved, too. `staging`: a directory beside the
        checkpoints that does not exist. The other models and the lengths are saved there before they become part of a
        checkpoint.
        """
        self._steps = steps
        self._evaluate_every = evaluate_every
        self._save_every = save_every
        self._queue = queue
        self._services = services
        self._feeder = feeder
        self.learner = learner
        self._evaluator = evaluator
        self._evaluation: asyncio.Task[None] | None = None
        """The newest."""
        self._models = models or {}
        self._lengths = lengths
        self._on_evaluation = on_evaluation
        self._staging = staging

    async def run(self, *, saves: bool = True) -> None:
        """Train to the end. An error of any task stops all of them and is raised (in an ExceptionGroup).

        `saves`: whether checkpoints are written.
        """
        async with asyncio.TaskGroup() as tasks:
            for service in self._services:
                tasks.create_task(service.run())
            tasks.create_task(put_lost_groups(self._queue, self._feeder.group_again))
            tasks.create_task(self._feeder.run(self._steps))
            await self._catch_up()
            while (version := self.learner.trained_steps) < self._steps:
                if version % self._evaluate_every == 0:
                    await self._begin_evaluation(version, tasks)
                await self._queue.advance(version)  # admits the prompts that wait for these weights
                await self._train(version)
                if saves:
                    await self._save_if_due(version + 1)
            await self._begin_evaluation(version, tasks)
            await self._evaluation_ended()
            await self._queue.close()

    async def resume_at(self, checkpoint: Path, state: RunState) -> None:
        """Go on from a verified checkpoint whose rows are in the queue."""
        for name, model in self._models.items():
            await model.restore(checkpoint / MODELS / name)
        if self._lengths is not None:
            restore_lengths(checkpoint, self._lengths)
        await self.learner.restore(checkpoint, state)
        self._feeder.resume_at(state.next_step)
        self._feeder.resume_kl(state.trained_steps, state.kl_coefficients)

    async def _begin_evaluation(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate beside all else. Engines keep the weights until the answers are generated; grading goes on."""
        if self._evaluator is None:
            return
        await self._evaluation_ended()
        await self.learner.hold()
        self._evaluation = tasks.create_task(self._evaluate(self._evaluator, version))

    async def _evaluate(self, evaluator: Evaluator, version: int) -> None:
        figures = await evaluator.run(version, generated=self.learner.release)
        self._on_evaluation(version, figures)

    async def _evaluation_ended(self) -> None:
        if self._evaluation is not None:
            await self._evaluation

    async def _save_if_due(self, trained: int) -> None:
        if trained % self._save_every == 0 or trained == self._steps:
            await self._evaluation_ended()
            await self.save()

    async def save(self) -> None:
        """Write a checkpoint of this moment."""
        if not self._models and self._lengths is None:
            await self.learner.save(self._feeder.next_step)
            return
        self._remove_staged()  # a crash may have ended an earlier save
        try:
            for name, model in self._models.items():
                await model.save(self._staging / MODELS / name)
            if self._lengths is not None:
                await asyncio.to_thread(save_lengths, self._staging, self._lengths)
            await self.learner.save(self._feeder.next_step, self._staging)
        finally:
            self._remove_staged()

    def _remove_staged(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)

    async def evidence(self) -> dict[str, Any]:
        """Return that of the policy; where other models are trained, too, that of each by its name."""
        policy = await self.learner.evidence()
        others = {name: await model.evidence() for name, model in self._models.items()}
        return {"policy": policy, **others} if others else policy

    async def _catch_up(self) -> None:
        """Train models that an interrupt left behind the policy, before there are responses for them to score."""
        if trained := self.learner.trained_steps:
            for name, model in self._models.items():
                await _train_model(name, model, trained - 1)

    async def _train(self, step: int) -> None:
        """Train every model for one step, at the same time."""
        async with asyncio.TaskGroup() as models:
            for name, model in self._models.items():
                models.create_task(_train_model(name, model, step))
            await self.learner.train(step)
        self._feeder.follow_kl(self.learner.kl_coefficient)


async def _train_model(name: str, model: ModelLearner, step: int) -> None:
    try:
        await model.train(step)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from error
