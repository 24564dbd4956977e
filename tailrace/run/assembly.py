"""From a configuration to the parts of a run, and from the parts to the pipeline.

Nothing here writes a file: the queue, which may have processes and files of its own, is opened apart, see `run_queue`.

Colocated: engine and trainer share one single-threaded executor, and with it the device, in turns.
"""

import asyncio
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_algorithm
from tailrace.config.cluster import ClusterConfig
from tailrace.config.run import RunConfig
from tailrace.config.weights import WeightsConfig
from tailrace.engine.base import Engine
from tailrace.errors import TailraceWarning
from tailrace.events import EventLog
from tailrace.models.tokenizer import ResponseText
from tailrace.preparation import check_cache, check_context, check_tokens, max_prompt_tokens, open_engine, open_model
from tailrace.prompts.load import PromptSet, load_prompts
from tailrace.rewards.answers import check_answers
from tailrace.rewards.pool import GraderPool
from tailrace.run.checkpoint import Checkpointer
from tailrace.run.evaluation import Evaluator, Generator, ways_of
from tailrace.run.learner import Learner, LocalLearner, Publisher
from tailrace.run.pipeline import Pipeline, Service
from tailrace.run.queue import OpenQueue
from tailrace.run.queue_observer import QueueObserver
from tailrace.run.recording import SampleRecorder
from tailrace.run.signal_check import SignalCheck
from tailrace.tasks.actor import Actor, train_sample
from tailrace.tasks.advantage import AdvantageTask
from tailrace.tasks.prompts import PromptFeeder
from tailrace.tasks.reference import LogProbs, ReferenceTask
from tailrace.tasks.reward import RewardTask
from tailrace.tasks.rollout import RolloutWorker
from tailrace.trainer.base import Trainer
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.trainer.export import export_dtype
from tailrace.trainer.factory import check_trainer, make_trainer
from tailrace.transfer.queue.base import Claim, TransferQueue
from tailrace.types import FloatArray, Prompt, WeightVersion

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run reads."""

    model_dir: Path
    prompts: PromptSet
    decode: ResponseText
    """Makes text of responses."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of it."""
        return self.prompts.longest


def load_inputs(config: RunConfig) -> Inputs:
    """Find the model and load the prompts; warn of what the recipe says in vain.

    Raises:
        UserError: the sampling, the engine, the model, the prompts or their lengths do not fit what was asked for.
    """
    _warn_of_worker_settings(config)
    here = config.pipeline.placement == "colocated" or config.cluster.address is None
    model_dir, tokenizer, decode = open_model(config, here=here)
    check_trainer(config.trainer)
    max_tokens = max_prompt_tokens(config.engine, config.sampling, config.prompts.max_prompt_tokens, model_dir)
    prompts = load_prompts(config.prompts, tokenizer, max_tokens=max_tokens)
    for of_set in (prompts.train, *prompts.evaluated.values()):
        check_tokens(of_set, model_dir)
    check_cache(config.engine, model_dir, longest_prompt=prompts.longest, max_new_tokens=config.sampling.max_new_tokens)
    return Inputs(model_dir=model_dir, prompts=prompts, decode=decode)


def _warn_of_worker_settings(config: RunConfig) -> None:
    """No error, since one recipe may be tried in both placements."""
    given = {"cluster": config.cluster != ClusterConfig(), "weights": config.weights != WeightsConfig()}
    if config.pipeline.placement == "colocated" and any(given.values()):
        sections = " and ".join(section for section, is_given in given.items() if is_given)
        warnings.warn(
            f"pipeline.placement is colocated, which uses nothing of the recipe's {sections}: all is in this process; "
            "for worker processes give pipeline.placement=separated",
            TailraceWarning,
            stacklevel=2,
        )


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


def make_run_trainer(config: RunConfig, model_dir: Path, *, reference: bool) -> Trainer:
    """The trainer of a run; see `make_trainer`."""
    return make_trainer(
        model_dir,
        config.trainer,
        temperature=config.sampling.temperature,
        total_updates=config.trainer.steps * config.mini_batches_per_step,
        device=config.device,
        reference=reference,
    )


class Placement(ABC):
    """Where the tasks of a run are: one implementation is below, the other is tailrace/run/separated.py."""

    @abstractmethod
    async def open(self, stack: AsyncExitStack) -> None:
        """Start what can be started before anything is written; `stack` closes it.

        Raises:
            UserError: a part cannot be made as configured.
        """

    @abstractmethod
    async def connect(self, queue: OpenQueue, store: CheckpointStore, log: EventLog, stack: AsyncExitStack) -> Pipeline:
        """The main loop, with everything that it drives.

        Raises:
            TailraceError: a part cannot start.
        """


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


def make_pipeline(
    config: RunConfig,
    inputs: Inputs,
    queue: TransferQueue,
    services: Sequence[Service],
    learner: Learner,
    evaluator: Evaluator | None,
) -> Pipeline:
    """The main loop around services and a learner, wherever they are."""
    return Pipeline(
        steps=config.trainer.steps,
        evaluate_every=config.evaluation.every,
        save_every=config.checkpoint.every,
        queue=queue,
        services=services,
        feeder=_feeder(config, inputs, queue),
        learner=learner,
        evaluator=evaluator,
    )


def evaluated(config: RunConfig, inputs: Inputs) -> dict[str, tuple[Prompt, ...]]:
    """The prompts that evaluations answer, by the name of their set; none is empty."""
    return {name: prompts[: config.evaluation.max_prompts] for name, prompts in inputs.prompts.evaluated.items()}


def make_evaluator(
    config: RunConfig, inputs: Inputs, engine: Generator, pool: GraderPool, log: EventLog, *, actor: str
) -> Evaluator | None:
    """Answers them with `engine`, and grades the answers in `pool`; None where there are none."""
    sets = evaluated(config, inputs)
    if not sets:
        return None
    ways = ways_of(config.evaluation, config.sampling)
    keep = SampleRecorder.of(config).of_evaluation
    return Evaluator(engine, pool, sets, ways, inputs.decode, log, seed=config.seed, actor=actor, keep=keep)


def make_learner(
    config: RunConfig,
    queue: TransferQueue,
    trainer: Trainer,
    executor: Executor,
    publisher: Publisher,
    store: CheckpointStore,
    log: EventLog,
    *,
    prompts: str,
    run_log: EventLog | None = None,
) -> LocalLearner:
    """The training side of the loop, in this process.

    `prompts`: their fingerprint. `run_log`: takes the events of whole steps, where `log` is a worker's.
    """
    actor = Actor(
        queue,
        trainer,
        make_algorithm(config.resolved_algorithm),
        executor,
        log,
        batch_size=config.trainer.train_batch_size,
        mini_batch_size=config.mini_batch_size,
    )
    checkpointer = Checkpointer(store, trainer, queue, executor, log, prompts=prompts)
    return LocalLearner(
        actor,
        trainer,
        executor,
        publisher,
        checkpointer,
        log,
        export_dtype=export_dtype(trainer.model_dir, config.generated_in),
        run_log=run_log,
        recorder=SampleRecorder.of(config),
        check=SignalCheck.of(config),
    )


def _feeder(config: RunConfig, inputs: Inputs, queue: TransferQueue) -> PromptFeeder:
    """Puts the run's prompts into the queue."""
    return PromptFeeder(
        queue,
        inputs.prompts.train,
        seed=config.seed,
        shuffle=config.prompts.shuffle,
        group_size=config.algorithm.group_size,
        groups_per_step=config.groups_per_step,
        max_staleness=config.pipeline.max_staleness,
    )


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


def reference_log_probs(trainer: Trainer, executor: Executor) -> LogProbs:
    """What the reference task computes, in the trainer's executor."""

    async def log_probs(claim: Claim) -> list[FloatArray]:
        samples = [train_sample(row) for row in claim.rows]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(executor, lambda: trainer.log_probs(samples, reference=True))

    return log_probs
