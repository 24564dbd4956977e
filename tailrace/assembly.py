"""From a configuration to the parts of a run, and from the parts to the pipeline.

Nothing here writes a file: the queue, which may have processes and files of its own, is opened apart, see `run_queue`.

Colocated: engine and trainer share one single-threaded executor, and with it the device, in turns.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_algorithm
from tailrace.checkpointing import Checkpointer
from tailrace.config.run import RunConfig
from tailrace.engine.base import Engine
from tailrace.errors import ConfigError
from tailrace.evaluation import Evaluator
from tailrace.events import EventLog
from tailrace.metrics import TaskTimes
from tailrace.models.resolve import resolve_model
from tailrace.models.tokenizer import decode_text, load_tokenizer
from tailrace.pipeline import Pipeline, Service
from tailrace.preparation import check_cache, check_engine, check_sampling, context_length, open_engine
from tailrace.prompts.load import PromptSet, load_prompts
from tailrace.rewards.pool import GraderPool
from tailrace.rollout.feeder import PromptFeeder
from tailrace.rollout.worker import RolloutWorker
from tailrace.tasks.advantage import AdvantageTask
from tailrace.tasks.reference import LogProbs, ReferenceTask
from tailrace.tasks.reward import RewardTask
from tailrace.trainer.actor import Actor, train_sample
from tailrace.trainer.base import Trainer
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.trainer.factory import check_trainer, make_trainer
from tailrace.transfer.queue.base import Claim, TransferQueue
from tailrace.types import FloatArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run reads."""

    model_dir: Path
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet

    def decode(self, token_ids: list[int]) -> str:
        """Text without special tokens."""
        return decode_text(self.tokenizer, token_ids)


def load_inputs(config: RunConfig) -> Inputs:
    """Find the model and load the prompts.

    Raises:
        UserError: the sampling, the engine, the model, the prompts or their lengths do not fit what was asked for.
    """
    model_dir = resolve_model(config.model)
    check_sampling(config.engine, config.sampling, model_dir)
    check_engine(config.engine, model_dir, device=config.device)
    check_trainer(config.trainer)
    tokenizer = load_tokenizer(model_dir)
    prompts = load_prompts(
        config.prompts, tokenizer, seed=config.seed, max_tokens=_max_prompt_tokens(config, model_dir)
    )
    return Inputs(model_dir=model_dir, tokenizer=tokenizer, prompts=prompts)


def _max_prompt_tokens(config: RunConfig, model_dir: Path) -> int:
    context = context_length(config.engine, model_dir)
    room = context - config.sampling.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_new_tokens {config.sampling.max_new_tokens} leaves no room for a prompt "
            f"in the context of {context} tokens; lower it"
        )
    asked = config.prompts.max_prompt_tokens
    if asked is not None and asked > room:
        raise ConfigError(
            f"prompts.max_prompt_tokens {asked} and sampling.max_new_tokens {config.sampling.max_new_tokens} "
            f"exceed the context of {context} tokens together; lower one of them"
        )
    return asked or room


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The long-lived objects of a run, but the queue."""

    executor: Executor
    algorithm: Algorithm
    pool: GraderPool
    engine: Engine
    trainer: Trainer

    async def compute(self, work: Callable[[], T]) -> T:
        """Do `work` in the device's executor."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


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
    check_cache(
        config.engine,
        engine,
        longest_prompt=max(len(prompt.prompt_ids) for prompt in (*inputs.prompts.train, *inputs.prompts.held_out)),
        max_new_tokens=config.sampling.max_new_tokens,
    )
    trainer = await loop.run_in_executor(executor, lambda: _trainer(config, inputs, algorithm))
    return Parts(executor=executor, algorithm=algorithm, pool=pool, engine=engine, trainer=trainer)


def _trainer(config: RunConfig, inputs: Inputs, algorithm: Algorithm) -> Trainer:
    return make_trainer(
        inputs.model_dir,
        config.trainer,
        temperature=config.sampling.temperature,
        total_updates=config.trainer.steps * config.mini_batches_per_step,
        device=config.device,
        reference=algorithm.needs_reference,
    )


def build_pipeline(
    config: RunConfig,
    inputs: Inputs,
    parts: Parts,
    queue: TransferQueue,
    store: CheckpointStore,
    log: EventLog,
    times: TaskTimes,
) -> Pipeline:
    """Connect the parts and the queue into the main loop."""
    parts.engine.log_to(log)
    feeder = PromptFeeder(
        queue,
        inputs.prompts.train,
        seed=config.seed,
        shuffle=config.prompts.shuffle,
        group_size=config.algorithm.group_size,
        groups_per_step=config.groups_per_step,
    )
    return Pipeline(
        steps=config.trainer.steps,
        evaluate_every=config.evaluation.every,
        queue=queue,
        services=_services(config, inputs, parts, queue, log),
        feeder=feeder,
        actor=_actor(config, parts, queue, log),
        trainer=parts.trainer,
        engine=parts.engine,
        evaluator=_evaluator(config, inputs, parts, log),
        checkpointer=Checkpointer(
            store,
            config.checkpoint,
            parts.trainer,
            queue,
            parts.executor,
            log,
            prompts=inputs.prompts.fingerprint,
        ),
        times=times,
        log=log,
    )


def _services(config: RunConfig, inputs: Inputs, parts: Parts, queue: TransferQueue, log: EventLog) -> list[Service]:
    """A worker for each task of the table but the actor, which the loop itself drives."""
    samples = config.trainer.train_batch_size
    makers: dict[str, Callable[[], Service]] = {
        "rollout": lambda: RolloutWorker(
            queue, parts.engine, config.sampling, inputs.decode, log, samples_per_step=samples
        ),
        "reward": lambda: RewardTask(queue, log, parts.pool, config.rewards, samples_per_step=samples),
        "reference": lambda: ReferenceTask(queue, log, _reference_log_probs(parts), samples_per_step=samples),
        "advantage": lambda: AdvantageTask(queue, log, parts.algorithm, samples_per_step=samples),
    }
    return [makers[spec.name]() for spec in parts.algorithm.tasks if spec.name != "actor"]


def _reference_log_probs(parts: Parts) -> LogProbs:
    async def log_probs(claim: Claim) -> list[FloatArray]:
        samples = [train_sample(row) for row in claim.rows]
        return await parts.compute(lambda: parts.trainer.log_probs(samples, reference=True))

    return log_probs


def _actor(config: RunConfig, parts: Parts, queue: TransferQueue, log: EventLog) -> Actor:
    return Actor(
        queue,
        parts.trainer,
        parts.algorithm,
        parts.executor,
        log,
        batch_size=config.trainer.train_batch_size,
        mini_batch_size=config.mini_batch_size,
    )


def _evaluator(config: RunConfig, inputs: Inputs, parts: Parts, log: EventLog) -> Evaluator | None:
    prompts = inputs.prompts.held_out[: config.evaluation.max_prompts]
    if not prompts:
        return None
    return Evaluator(parts.engine, parts.pool, prompts, config.sampling, inputs.decode, log)
