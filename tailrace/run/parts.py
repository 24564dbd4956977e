"""The parts of a run that are alike in both placements: trainer, learner, evaluator, feeder and main loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.table import TableTask, Train
from tailrace.config.algorithm import CriticConfig, PolicyGradientConfig
from tailrace.config.run import RunConfig
from tailrace.errors import AlgorithmError
from tailrace.events import EventLog
from tailrace.host.user_code import making
from tailrace.planning.kl_control import KlCoefficients
from tailrace.rewards.graders import Graders
from tailrace.run.checkpoint import Checkpointer
from tailrace.run.directory import RunDirectory
from tailrace.run.evaluation import Evaluator, Generator, ways_of
from tailrace.run.inputs import Inputs
from tailrace.run.keep_best import EvaluationNotes
from tailrace.run.learner import Learner, LocalLearner, LocalModelLearner, ModelLearner, Publisher
from tailrace.run.pipeline import Pipeline
from tailrace.run.queue import OpenQueue
from tailrace.run.recording import SampleRecorder
from tailrace.run.signal_check import SignalCheck
from tailrace.tasks.actor import Actor
from tailrace.tasks.base import Service
from tailrace.tasks.context import TaskContext
from tailrace.tasks.prompts import PromptFeeder
from tailrace.trainer.base import Trainer
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.trainer.export import export_dtype
from tailrace.trainer.factory import make_critic
from tailrace.transfer.queue.base import TransferQueue
from tailrace.types import Prompt


class Placement(ABC):
    """A placement of the run's tasks: `Colocated` (run/colocated.py) or `Separated` (run/separated.py)."""

    @abstractmethod
    async def open(self, stack: AsyncExitStack) -> None:
        """Start the parts that can start before anything is written; `stack` closes them.

        Raises:
            UserError: a part cannot be made as configured.
        """

    @abstractmethod
    async def connect(self, queue: OpenQueue, store: CheckpointStore, log: EventLog, stack: AsyncExitStack) -> Pipeline:
        """Make the main loop with everything that it drives.

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
    store: CheckpointStore,
    models: Mapping[str, ModelLearner] | None = None,
) -> Pipeline:
    """Make the main loop around services and learners, in either placement. `models`: see `Pipeline`."""
    return Pipeline(
        steps=config.trainer.steps,
        evaluate_every=config.evaluation.every,
        save_every=config.checkpoint.every,
        queue=queue,
        services=services,
        feeder=make_feeder(config, inputs, queue),
        learner=learner,
        evaluator=evaluator,
        models=models,
        lengths=inputs.lengths,
        on_evaluation=EvaluationNotes(store).take,
        staging=RunDirectory(Path(config.output_dir)).staging,
    )


def evaluated(config: RunConfig, inputs: Inputs) -> dict[str, tuple[Prompt, ...]]:
    """The prompts that evaluations answer, by the name of their set; none is empty."""
    return {name: prompts[: config.evaluation.max_prompts] for name, prompts in inputs.prompts.evaluated.items()}


def make_evaluator(
    config: RunConfig, inputs: Inputs, engine: Generator, graders: Graders | None, log: EventLog, *, actor: str
) -> Evaluator | None:
    """Make the evaluator, which answers prompts with `engine` and has `graders` grade them; None without prompts."""
    sets = evaluated(config, inputs)
    if not sets:
        return None
    assert graders is not None
    ways = ways_of(config.evaluation, config.sampling)
    keep = SampleRecorder.of(config).of_evaluation
    return Evaluator(engine, graders, sets, ways, inputs.decode, log, seed=config.seed, actor=actor, keep=keep)


def make_learner(
    context: TaskContext,
    algorithm: Algorithm,
    trainer: Trainer,
    publisher: Publisher,
    store: CheckpointStore,
    *,
    prompts: str,
    run_log: EventLog | None = None,
    tell: Callable[[], None] | None = None,
) -> LocalLearner:
    """Make the training side of the loop in this process. `context`: that of the trainer's pool.

    `prompts`: their fingerprint. `run_log`: takes the events of whole steps where the context's log is a worker's.
    `tell`: see `LocalLearner`.
    """
    config, executor, log = context.config, context.executor, context.log
    task, work = algorithm.policy_task()
    observe_trainer(context, trainer)
    actor = make_actor(context, task, work, trainer, row="trainer")
    checkpointer = Checkpointer(store, trainer, context.queue, executor, log, prompts=prompts)
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
        tell=tell,
        kl=kl_coefficients(config),
    )


def observe_trainer(context: TaskContext, trainer: Trainer) -> None:
    """Have the events about the pool of `context` tell the parts of the update, and the trainer's memory."""
    context.activity.divide("update", trainer.take_seconds)
    context.memory.add(trainer.memory)


def make_actor(context: TaskContext, task: TableTask, work: Train, trainer: Trainer, *, row: str) -> Actor:
    """Make the actor that trains the model of `task`. `row`: its line in the timeline."""
    config = context.config
    return Actor(
        context.queue,
        trainer,
        task.name,
        work.loss,
        context.executor.during("update"),
        context.log,
        context.activity,
        batch_size=config.trainer.train_batch_size,
        mini_batch_size=config.mini_batch_size,
        epochs=config.trainer.epochs,
        row=row,
    )


async def make_model_learner(task: TableTask, work: Train, context: TaskContext) -> LocalModelLearner:
    """Make the learner of a model other than the policy, in this process. Its trainer is added to `context`.

    Raises:
        AlgorithmError: its trainer cannot be made, or is none.
    """
    assert work.make_trainer is not None
    make = work.make_trainer

    def made() -> Trainer:
        if isinstance(make, CriticConfig):
            return make_critic(context.config, context.model_dir, make)
        with making(f"the trainer of task {task.name!r}", AlgorithmError):
            trainer = make(context.config, context.model_dir)
        if not isinstance(trainer, Trainer):
            raise AlgorithmError(
                f"task {task.name!r} of the algorithm made a {type(trainer).__name__} for its trainer; it must make a "
                "tailrace.trainer.base.Trainer"
            )
        return trainer

    trainer = await asyncio.get_running_loop().run_in_executor(context.executor, made)
    context.trainers[task.name] = trainer
    observe_trainer(context, trainer)
    actor = make_actor(context, task, work, trainer, row=task.name)
    return LocalModelLearner(actor, trainer, context.executor)


def make_feeder(config: RunConfig, inputs: Inputs, queue: TransferQueue) -> PromptFeeder:
    """Make the feeder, which puts the run's prompts into the queue."""
    return PromptFeeder(
        queue,
        inputs.prompts.train,
        seed=config.seed,
        shuffle=config.prompts.shuffle,
        group_size=config.algorithm.group_size,
        groups_per_step=config.groups_per_step,
        max_staleness=config.pipeline.max_staleness,
        kl=kl_coefficients(config),
    )


def kl_coefficients(config: RunConfig) -> KlCoefficients | None:
    """The coefficients of the KL penalty before the first step; None where it is not adaptive, or there is none."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig) or algorithm.kl.adaptive is None:
        return None
    return KlCoefficients(algorithm.kl, config.pipeline.max_staleness)
