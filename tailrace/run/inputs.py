"""The inputs of a run, an evaluation or a generation: a model with its tokenizer, and prompts that fit it."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.config.cluster import ROLLOUT, ClusterConfig, pool_key
from tailrace.config.engine import EngineConfig, SamplingConfig
from tailrace.config.generate import EvalConfig, GenerateConfig, ServeConfig
from tailrace.config.rewards import ModelReward, RewardsConfig, grader_key
from tailrace.config.run import RunConfig
from tailrace.config.weights import WeightsConfig
from tailrace.engine.checks import check_engine, check_sampling
from tailrace.engine.factory import make_backend
from tailrace.errors import ConfigError, ModelError, TailraceWarning
from tailrace.models.info import describe_model
from tailrace.models.loading import check_model
from tailrace.models.resolve import resolve_model
from tailrace.models.tokenizer import ResponseText, load_tokenizer
from tailrace.planning.lengths.base import LengthPredictor
from tailrace.prompts.load import PromptSet, load_prompts
from tailrace.run.lengths import make_lengths
from tailrace.tasks.replay import load_replay
from tailrace.trainer.factory import check_trainer
from tailrace.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_model(
    config: RunConfig | GenerateConfig | EvalConfig | ServeConfig, *, here: bool = True
) -> tuple[Path, "PreTrainedTokenizerBase", ResponseText]:
    """Find the model and check that engine and sampling fit it.

    Returns its directory, its tokenizer, and the function that makes text of responses. `here`: see `check_engine`.

    Raises:
        UserError: the model is missing or cannot be read, or engine or sampling do not fit it.
    """
    model_dir = resolve_model(config.model)
    check_sampling(config.engine, config.sampling, model_dir)
    check_model(model_dir)
    check_engine(config.engine, model_dir, device=config.device, here=here)
    tokenizer = load_tokenizer(model_dir)
    return model_dir, tokenizer, ResponseText(tokenizer, model_dir, config.sampling)


def max_prompt_tokens(engine: EngineConfig, sampling: SamplingConfig, asked: int | None, model_dir: Path) -> int:
    """The largest number of prompt tokens that leaves room for a whole response. `asked`: `prompts.max_prompt_tokens`.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: there is no room.
    """
    context = make_backend(engine).context_length(model_dir)
    room = context - sampling.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt "
            f"in the context of {context} tokens; lower it"
        )
    if asked is not None and asked > room:
        raise ConfigError(
            f"prompts.max_prompt_tokens {asked} and sampling.max_new_tokens {sampling.max_new_tokens} "
            f"exceed the context of {context} tokens together; lower one of them"
        )
    return asked or room


def check_tokens(prompts: Sequence[Prompt], model_dir: Path) -> None:
    """Check that the model has all tokens that its tokenizer makes of the prompts.

    Raises:
        ModelError: it lacks one.
    """
    vocab = describe_model(model_dir).vocab
    for prompt in prompts:
        if (largest := int(prompt.prompt_ids.max(initial=0))) >= vocab:
            raise ModelError(
                f"the tokenizer in {model_dir} makes token {largest} of {prompt.prompt_id}, and the model's are "
                f"0 … {vocab - 1}; give the tokenizer that belongs to the model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a run."""

    model_dir: Path
    prompts: PromptSet
    decode: ResponseText
    """Makes text of responses."""
    lengths: LengthPredictor | None = None
    """Expects the lengths of responses, where the recipe says so."""

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return self.prompts.longest

    @property
    def model_kind(self) -> str:
        """See `ModelInfo.kind`."""
        return describe_model(self.model_dir).kind


def load_inputs(config: RunConfig, *, here: bool = True) -> Inputs:
    """Find the model and load the prompts. Warn of sections of the recipe that have no effect.

    `here`: whether this machine has the run's device.

    Raises:
        UserError: the sampling, the engine, the model, the prompts or their lengths do not fit the recipe.
    """
    _warn_of_worker_settings(config)
    here = here and (config.pipeline.placement == "colocated" or config.cluster.address is None)
    model_dir, tokenizer, decode = open_model(config, here=here)
    check_trainer(config.trainer)
    _check_reward_models(config.rewards)
    _check_pools(config, model_dir, here=here)
    prompts = load_prompts(config.prompts, tokenizer, max_tokens=_max_prompt_tokens(config, model_dir))
    for of_set in (prompts.train, *prompts.evaluated.values()):
        check_tokens(of_set, model_dir)
    for pool, engine in config.engines.items():
        with _named(pool):
            make_backend(engine).check_cache(
                model_dir, longest_prompt=prompts.longest, max_new_tokens=config.sampling.max_new_tokens
            )
    if (replay := load_replay(config.pipeline.replay)) is not None:
        replay.check(
            groups=config.trainer.steps * config.groups_per_step,
            group_size=config.algorithm.group_size,
            max_new_tokens=config.sampling.max_new_tokens,
        )
    lengths = None if config.rollout.lengths is None else make_lengths(config.rollout.lengths, model_dir)
    return Inputs(model_dir=model_dir, prompts=prompts, decode=decode, lengths=lengths)


def _check_reward_models(config: RewardsConfig) -> None:
    """Check, without loading them, that reward models are there and give one score."""
    for name, grading in config.each.items():
        if isinstance(grading.grader, ModelReward):
            from tailrace.models.classifier import check_classifier  # slow: only where there is one

            check_classifier(resolve_model(grading.grader.model, grader_key(name)), grader_key(name))


def _check_pools(config: RunConfig, model_dir: Path, *, here: bool) -> None:
    """Check the engines of further rollout pools as `open_model` does that of the run."""
    for pool, engine in config.engines.items():
        if pool != ROLLOUT:
            with _named(pool):
                check_sampling(engine, config.sampling, model_dir)
                check_engine(engine, model_dir, device=config.device, here=here)


def _max_prompt_tokens(config: RunConfig, model_dir: Path) -> int:
    """The largest number of prompt tokens that leaves room for a whole response in the engines of every pool."""
    most = []
    for pool, engine in config.engines.items():
        with _named(pool):
            most.append(max_prompt_tokens(engine, config.sampling, config.prompts.max_prompt_tokens, model_dir))
    return min(most)


@contextmanager
def _named(pool: str) -> Iterator[None]:
    """Name the pool in an error about the engines of a further one."""
    try:
        yield
    except ConfigError as error:
        if pool == ROLLOUT:
            raise
        raise ConfigError(f"{pool_key(pool)}: {error}") from None


def _warn_of_worker_settings(config: RunConfig) -> None:
    """Warn of sections that only worker processes use. It is no error: one recipe may be tried in both placements."""
    given = {"cluster": config.cluster != ClusterConfig(), "weights": config.weights != WeightsConfig()}
    if config.pipeline.placement == "colocated" and any(given.values()):
        sections = " and ".join(section for section, is_given in given.items() if is_given)
        warnings.warn(
            f"pipeline.placement is colocated, which uses nothing of the recipe's {sections}: all is in this process; "
            "for worker processes give pipeline.placement=separated",
            TailraceWarning,
            stacklevel=2,
        )
