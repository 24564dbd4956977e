"""A run whose tasks are all in this process.

Engine and trainer share one thread, and with it the device, in turns.

Nothing here writes a file. The queue may have processes and files; it is opened elsewhere (run/queue.py).
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tailrace.activity import Activity, TimedExecutor
from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_run_algorithm
from tailrace.config.cluster import ROLLOUT
from tailrace.config.run import RunConfig
from tailrace.engine.base import Engine
from tailrace.engine.checks import check_context
from tailrace.engine.opening import open_engine
from tailrace.events import EventLog
from tailrace.registers.events import EventKind
from tailrace.rewards.answers import check_answers
from tailrace.rewards.graders import Graders
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.local import LocalPort
from tailrace.run.endpoint import endpoint
from tailrace.run.generation import Generation
from tailrace.run.inputs import Inputs
from tailrace.run.learner import ModelLearner
from tailrace.run.observer import Observer
from tailrace.run.parts import Placement, evaluated, make_evaluator, make_learner, make_model_learner, make_pipeline
from tailrace.run.pipeline import Pipeline
from tailrace.run.queue import OpenQueue
from tailrace.run.workers.pools import actor_of
from tailrace.tasks.context import TaskContext
from tailrace.tasks.factory import make_services
from tailrace.tasks.memory import MemoryUse
from tailrace.tasks.replay import can_continue, load_replay, replaying
from tailrace.trainer.base import Trainer
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.trainer.factory import make_run_trainer
from tailrace.transfer.queue.base import TransferQueue
from tailrace.types import WeightVersion

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The long-lived objects of a run in one process, except the queue."""

    device: Executor
    """The thread that engine and trainer share."""
    engine_work: TimedExecutor
    """Runs the engine's work on `device`."""
    algorithm: Algorithm
    graders: Graders | None
    """None where nothing is graded."""
    engine: Engine
    trainer: Trainer


async def open_parts(config: RunConfig, inputs: Inputs, stack: AsyncExitStack) -> Parts:
    """Start grading processes, engine and trainer; `stack` closes them.

    Raises:
        UserError: a part cannot be made as configured.
    """
    algorithm = make_run_algorithm(config)
    graders = None
    if config.pipeline.replay is None or evaluated(config, inputs):
        graders = await stack.enter_async_context(Graders(config.rewards))
    device = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="device"))
    engine_work = TimedExecutor(device)
    executor = engine_work.during("generation")
    engine = await open_engine(config.engines[ROLLOUT], inputs.model_dir, device=config.device, executor=executor)
    stack.push_async_callback(engine.close)
    check_context(engine, longest_prompt=inputs.longest_prompt)
    trainer = await asyncio.get_running_loop().run_in_executor(
        device, lambda: make_run_trainer(config, inputs.model_dir)
    )
    return Parts(
        device=device, engine_work=engine_work, algorithm=algorithm, graders=graders, engine=engine, trainer=trainer
    )


class Colocated(Placement):
    """A placement with every task in this process."""

    def __init__(self, config: RunConfig, inputs: Inputs) -> None:
        self._config = config
        self._inputs = inputs

    async def open(self, stack: AsyncExitStack) -> None:
        """Start grading processes, engine and trainer."""
        _log.info("loading the model for engine and trainer")
        self._parts = await open_parts(self._config, self._inputs, stack)
        if self._config.pipeline.replay is None:  # otherwise nothing is graded
            await check_answers(self._config.rewards, self._inputs.prompts.by_source, self._parts.graders)

    async def connect(self, queue: OpenQueue, store: CheckpointStore, log: EventLog, stack: AsyncExitStack) -> Pipeline:
        """Connect the parts and the queue."""
        return await build_pipeline(self._config, self._inputs, self._parts, queue.queue, store, log, stack)


async def build_pipeline(
    config: RunConfig,
    inputs: Inputs,
    parts: Parts,
    queue: TransferQueue,
    store: CheckpointStore,
    log: EventLog,
    stack: AsyncExitStack,
) -> Pipeline:
    """Connect the parts and the queue into the main loop."""
    parts.engine.log_to(log)
    memory = MemoryUse(log, "driver", config.device)
    pools = {pool: _context(pool, config, inputs, parts, queue, log, memory, stack) for pool in parts.algorithm.pools()}
    activities = [context.activity for context in pools.values()]
    tell = partial(_tell, activities, memory if config.observe.breakdown else None)
    weights, prompts = EngineWeights(parts, log, pools["rollout"].activity), inputs.prompts.fingerprint
    learner = make_learner(pools["trainer"], parts.algorithm, parts.trainer, weights, store, prompts=prompts, tell=tell)
    models: dict[str, ModelLearner] = {
        task.name: await make_model_learner(task, work, pools[task.pool])
        for task, work in parts.algorithm.other_models()
    }
    generation = _generation(config, inputs, parts, queue, log, pools["rollout"].activity)
    if (http := config.rollout.http) is not None:
        # The engine's version: an evaluation may hold back what is trained already.
        run, newest = Path(config.output_dir), lambda: parts.engine.stats().version
        serving = endpoint(http, generation.service, inputs.model_dir, inputs.decode, newest, run)
        await stack.enter_async_context(serving)
    engines = generation.service.newest(lambda: learner.trained_steps)
    evaluator = make_evaluator(config, inputs, engines, parts.graders, log, actor="engine")
    services = [
        service for pool, context in pools.items() for service in await make_services(parts.algorithm, pool, context)
    ]
    services += [generation, Observer(queue, log, tell)]
    return make_pipeline(config, inputs, queue, services, learner, evaluator, store, models)


def _generation(
    config: RunConfig, inputs: Inputs, parts: Parts, queue: TransferQueue, log: EventLog, activity: Activity
) -> Generation:
    """`activity`: that of the engine."""
    replay = load_replay(config.pipeline.replay)
    port = LocalPort(
        parts.engine,
        EngineFacts(continues=can_continue(parts.engine, replay)),
        log=log,
        activity=activity,
        submit=replaying(parts.engine, activity, replay),
    )
    return Generation(config, [port], queue, inputs.decode, log, lengths=inputs.lengths)


def _tell(activities: Sequence[Activity], memory: MemoryUse | None) -> None:
    """Emit the events about the pools' time and this process's memory since the last call."""
    for activity in activities:
        activity.emit()
    if memory is not None:
        memory.emit()


def _context(
    pool: str,
    config: RunConfig,
    inputs: Inputs,
    parts: Parts,
    queue: TransferQueue,
    log: EventLog,
    memory: MemoryUse,
    stack: AsyncExitStack,
) -> TaskContext:
    """Make the context of a pool's tasks. Each pool has its own activity, as its workers would have."""
    activity = Activity(log, actor_of(pool), breakdown=config.observe.breakdown)
    executor = TimedExecutor(parts.device, activity)
    if pool == "rollout":
        executor = parts.engine_work
        executor.activity = activity
        activity.divide("generation", parts.engine.take_seconds)
        memory.add(parts.engine.memory)
    return TaskContext(
        config=config,
        model_dir=inputs.model_dir,
        queue=queue,
        log=log,
        activity=activity,
        memory=memory,
        executor=executor,
        stack=stack,
        graders=dict(parts.graders.pools) if parts.graders else {},
    )


class EngineWeights:
    """Gives the trainer's weights to the engine in the same process."""

    def __init__(self, parts: Parts, log: EventLog, activity: Activity) -> None:
        """`activity`: that of the engine."""
        self._parts = parts
        self._log = log
        self._activity = activity

    async def publish(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        with (
            self._activity.busy("weight_transfer"),
            self._log.span(EventKind.UPDATE_WEIGHTS, "engine", version=version),
        ):
            await self._parts.engine.update_weights(version, self._parts.trainer.weights())

    async def settle(self, version: WeightVersion) -> None:
        """Return at once: `publish` has installed the weights."""
