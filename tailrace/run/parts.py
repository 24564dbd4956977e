"""The parts of a run that are made alike wherever its tasks are: trainer, learner, evaluator, feeder and main loop."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack

from tailrace.activity import Activity
from tailrace.algorithms.factory import make_algorithm
from tailrace.config.run import RunConfig
from tailrace.events import EventLog
from tailrace.rewards.pool import GraderPool
from tailrace.run.checkpoint import Checkpointer
from tailrace.run.evaluation import Evaluator, Generator, ways_of
from tailrace.run.inputs import Inputs
from tailrace.run.learner import Learner, LocalLearner, Publisher
from tailrace.run.pipeline import Pipeline
from tailrace.run.queue import OpenQueue
from tailrace.run.recording import SampleRecorder
from tailrace.run.signal_check import SignalCheck
from tailrace.tasks.actor import Actor
from tailrace.tasks.base import Service
from tailrace.tasks.prompts import PromptFeeder
from tailrace.trainer.base import Trainer
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.trainer.export import export_dtype
from tailrace.transfer.queue.base import TransferQueue
from tailrace.types import Prompt


class Placement(ABC):
    """Where the tasks of a run are: run/colocated.py and run/separated.py have the two."""

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
        feeder=make_feeder(config, inputs, queue),
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
    activity: Activity,
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
        activity,
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


def make_feeder(config: RunConfig, inputs: Inputs, queue: TransferQueue) -> PromptFeeder:
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
