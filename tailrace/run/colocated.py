"""A run whose tasks are all in this process.

Nothing here writes a file: the queue, which may have processes and files of its own, is opened apart (run/queue.py).

Engine and trainer share one single-threaded executor, and with it the device, in turns.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_algorithm
from tailrace.config.run import RunConfig
from tailrace.engine.base import Engine
from tailrace.engine.checks import check_context
from tailrace.engine.opening import open_engine
from tailrace.events import EventLog
from tailrace.rewards.answers import check_answers
from tailrace.rewards.pool import GraderPool
from tailrace.run.inputs import Inputs
from tailrace.run.parts import (
    Placement,
    make_evaluator,
    make_learner,
    make_pipeline,
    make_run_trainer,
    reference_log_probs,
)
from tailrace.run.pipeline import Pipeline, Service
from tailrace.run.queue import OpenQueue
from tailrace.run.queue_observer import QueueObserver
from tailrace.tasks.advantage import AdvantageTask
from tailrace.tasks.reference import ReferenceTask
from tailrace.tasks.reward import RewardTask
from tailrace.tasks.rollout import RolloutWorker
from tailrace.trainer.base import Trainer
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.transfer.queue.base import TransferQueue
from tailrace.types import WeightVersion

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The long-lived objects of a run in one process, but the queue."""

    executor: Executor
    algorithm: Algorithm
    pool: GraderPool
    engine: Engine
    trainer: Trainer


async def open_parts(config: RunConfig, inputs: Inputs, stack: AsyncExitStack) -> Parts:
    """Start grading processes, engine and trainer; `stack` closes them.

    Raises:
        UserError: a part cannot be made as configured.
    """
    algorithm = make_algorithm(config.resolved_algorithm)
    pool = await stack.enter_async_context(GraderPool(config.rewards))
    executor = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="device"))
    loop = asyncio.get_running_loop()
    engine = await open_engine(config.engine, inputs.model_dir, device=config.device, executor=executor)
    stack.push_async_callback(engine.close)
    check_context(engine, longest_prompt=inputs.longest_prompt)
    trainer = await loop.run_in_executor(
        executor, lambda: make_run_trainer(config, inputs.model_dir, reference=algorithm.needs_reference)
    )
    return Parts(executor=executor, algorithm=algorithm, pool=pool, engine=engine, trainer=trainer)


class Colocated(Placement):
    """Everything in this process."""

    def __init__(self, config: RunConfig, inputs: Inputs) -> None:
        self._config = config
        self._inputs = inputs

    async def open(self, stack: AsyncExitStack) -> None:
        """Start grading processes, engine and trainer."""
        _log.info("loading the model for engine and trainer")
        self._parts = await open_parts(self._config, self._inputs, stack)
        await check_answers(self._config.rewards, self._inputs.prompts.by_source, self._parts.pool)

    async def connect(self, queue: OpenQueue, store: CheckpointStore, log: EventLog, stack: AsyncExitStack) -> Pipeline:
        """Connect the parts and the queue."""
        return build_pipeline(self._config, self._inputs, self._parts, queue.queue, store, log)


def build_pipeline(
    config: RunConfig, inputs: Inputs, parts: Parts, queue: TransferQueue, store: CheckpointStore, log: EventLog
) -> Pipeline:
    """Connect the parts and the queue into the main loop."""
    parts.engine.log_to(log)
    learner = make_learner(
        config,
        queue,
        parts.trainer,
        parts.executor,
        EngineWeights(parts, log),
        store,
        log,
        prompts=inputs.prompts.fingerprint,
    )
    evaluator = make_evaluator(config, inputs, parts.engine, parts.pool, log, actor="engine")
    return make_pipeline(config, inputs, queue, _services(config, inputs, parts, queue, log), learner, evaluator)


class EngineWeights:
    """Gives the trainer's weights to the engine in the same process."""

    def __init__(self, parts: Parts, log: EventLog) -> None:
        self._parts = parts
        self._log = log

    async def publish(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        with self._log.span("update_weights", "engine", version=version):
            await self._parts.engine.update_weights(version, self._parts.trainer.weights())

    async def settle(self, version: WeightVersion) -> None:
        """It has been published into the engine."""


def _services(config: RunConfig, inputs: Inputs, parts: Parts, queue: TransferQueue, log: EventLog) -> list[Service]:
    """A worker for each task of the table but the actor, which the loop itself drives; and who looks at the queue."""
    samples = config.trainer.train_batch_size
    makers: dict[str, Callable[[], Service]] = {
        "rollout": lambda: RolloutWorker(
            queue,
            parts.engine,
            config.sampling,
            inputs.decode,
            log,
            samples_per_step=samples,
            max_staleness=config.pipeline.max_staleness,
        ),
        "reward": lambda: RewardTask(queue, log, parts.pool, config.rewards, samples_per_step=samples),
        "reference": lambda: ReferenceTask(
            queue, log, reference_log_probs(parts.trainer, parts.executor), samples_per_step=samples
        ),
        "advantage": lambda: AdvantageTask(queue, log, parts.algorithm, samples_per_step=samples),
    }
    workers = [makers[spec.name]() for spec in parts.algorithm.tasks if spec.name != "actor"]
    return [*workers, QueueObserver(queue, log)]
