"""Schemas of the commands that use an engine without training: `tailrace generate`, `eval` and `profile`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tailrace.config.base import Batch, Count, Device, Listed, PathText, Processes, Seed
from tailrace.config.engine import EngineConfig, NativeEngineConfig, OnDevice, SamplingConfig
from tailrace.config.evaluation import EvaluationConfig
from tailrace.config.model import ModelConfig
from tailrace.config.prompts import AnySource, EvaluatedPromptsConfig, Presentation, PromptsConfig
from tailrace.config.rewards import RewardsConfig
from tailrace.host.cpu import usable_cores


class _OnEngine(OnDevice):
    """A model in an engine on a device."""

    seed: Seed = 0
    """Fixes every random choice."""
    device: Device = "cpu"
    """cpu, cuda, cuda:N, xpu, xpu:N or mps; only cpu has been tested."""
    threads: Processes | None = None
    """Threads of torch; the machine's cores by default."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = NativeEngineConfig()


class GeneratePromptsConfig(Presentation):
    """What is to be answered, unless the prompts are given as arguments."""

    source: AnySource | None = Field(default=None, discriminator="type")
    """Where prompts come from."""


class GenerateConfig(_OnEngine):
    """One `tailrace generate`."""

    samples: Count = 1
    """Responses to each prompt."""
    order: Literal["first_in", "longest_first"] = "first_in"
    """Which requests start first: those of the first prompts, or those with the largest `expected_tokens`, a column of
    the prompts (which `engine.adaptive_tp.estimate` ranked reads, too)."""
    prompts: GeneratePromptsConfig = GeneratePromptsConfig()
    sampling: SamplingConfig = SamplingConfig()

    @classmethod
    def part_of_training(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """How prompts are presented, and not which: those to be answered are given otherwise."""
        prompts = values.get("prompts")
        if not isinstance(prompts, dict):
            return dict(values)
        return {**values, "prompts": {key: value for key, value in prompts.items() if key != "source"}}


class EvalConfig(_OnEngine):
    """One `tailrace eval`."""

    prompts: EvaluatedPromptsConfig = EvaluatedPromptsConfig()
    rewards: RewardsConfig
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @classmethod
    def part_of_training(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """A run holds out prompts unless told otherwise."""
        prompts = values.get("prompts")
        held_out = PromptsConfig.model_fields["held_out"].default
        return {**values, "prompts": {"held_out": held_out, **prompts}} if isinstance(prompts, dict) else dict(values)


class ProfileConfig(_OnEngine):
    """One `tailrace profile engine`."""

    batch_sizes: Annotated[Listed[Batch], Field(min_length=1)] = (1, 8, 32, 64)
    """Sequences that decode together; each is measured by itself."""
    prompt_tokens: Count = 64
    """Random tokens of each prompt."""
    new_tokens: Annotated[int, Field(ge=2, le=10**9)] = 64
    """Of each response. All but the first come from steps that only decode, which are the ones reported."""


class TPProfileConfig(_OnEngine):
    """One `tailrace profile tp`."""

    engine: NativeEngineConfig = NativeEngineConfig()
    """By default it has as many ranks as the machine has cores, and two at least."""
    degrees: Listed[Processes] | None = None
    """TP degrees to measure, two or more divisors of dp · tp; by default all that the model can be split in."""
    token_budget: Count | None = None
    """Cached tokens of a replica at most; by default what the cache holds, up to 16384. Beyond that the times are
    extrapolated."""
    max_batch_size: Batch | None = None
    """Sequences that a replica decodes together at most; by default those of the engine."""
    max_length: Count | None = None
    """Tokens of a sequence at most; by default what the context has room for, up to 2048."""
    points: Annotated[int, Field(ge=3, le=10000)] = 18
    """Pairs of batch size and length at most, which are measured under each degree."""
    steps: Count = 16
    """Decode steps of each measurement."""
    rounds: Count = 3
    """Times that everything is measured; the medians count."""
    output: PathText | None = None
    """The profile's file; by default the one in Tailrace's cache where engines with adaptive_tp look for it."""

    @field_validator("engine", mode="before")
    @classmethod
    def _of_several_ranks(cls, engine: Any) -> Any:
        """As many as there are cores where nobody says how many. They are rearranged, which a link has to know."""
        given = engine.model_dump(exclude_unset=True) if isinstance(engine, NativeEngineConfig) else engine
        if not isinstance(given, dict):
            return given
        if given.get("dp") is None and given.get("tp") is None:
            given = {**given, "dp": max(2, len(usable_cores()))}
        if given.get("dp", 1) == given.get("tp", 1) == 1:
            raise ValueError("has one rank, and one cannot be arranged in several ways; raise engine.dp or engine.tp")
        return {"adaptive_tp": {}, **given}

    @model_validator(mode="after")
    def _several_degrees(self) -> Self:
        for degree in self.all_degrees:
            if self.engine.ranks % degree:
                ranks = self.engine.ranks
                raise ValueError(f"degrees has {degree}, which does not divide dp · tp = {ranks}; remove it")
        if len(self.all_degrees) < 2:
            alone = self.all_degrees[0]
            raise ValueError(f"degrees has {alone} alone, which leaves no choice; add another, or leave it out")
        return self

    @property
    def all_degrees(self) -> tuple[int, ...]:
        """Those to measure, ascending; by default all divisors, some of which a model may not allow."""
        divisors = (degree for degree in range(1, self.engine.ranks + 1) if self.engine.ranks % degree == 0)
        return tuple(sorted(set(self.degrees or divisors)))
