"""Schemas of the commands that use an engine without training: `tailrace generate`, `eval` and `profile`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tailrace.config.base import Batch, Count, Device, Listed, PathText, Processes, Seconds, Seed
from tailrace.config.engine import EngineConfig, NativeEngineConfig, OnDevice, SamplingConfig
from tailrace.config.evaluation import EvaluationConfig
from tailrace.config.model import ModelConfig
from tailrace.config.prompts import AnySource, EvaluatedPromptsConfig, Presentation, PromptsConfig
from tailrace.config.rewards import RewardsConfig
from tailrace.host.cpu import usable_cores


class _OnEngine(OnDevice):
    """A model in an engine on a device."""

    seed: Seed = 0
    """Seed of every random choice."""
    device: Device = "cpu"
    """cpu, cuda, cuda:N, xpu, xpu:N or mps; tested on CPUs, and on one NVIDIA GPU."""
    threads: Processes | None = None
    """PyTorch threads; by default as many as the machine has cores."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = NativeEngineConfig()


class GeneratePromptsConfig(Presentation):
    """The prompts to answer, unless they are given as arguments."""

    source: AnySource | None = Field(default=None, discriminator="type")
    """Source of the prompts."""


class GenerateConfig(_OnEngine):
    """The configuration of `tailrace generate`."""

    samples: Count = 1
    """Number of responses to each prompt."""
    order: Literal["first_in", "longest_first"] = "first_in"
    """Which requests start first: those of the first prompts, or those with the largest `expected_tokens`. That is a
    column of the prompts; `engine.adaptive_tp.estimate` ranked reads it, too."""
    prompts: GeneratePromptsConfig = GeneratePromptsConfig()
    sampling: SamplingConfig = SamplingConfig()

    @classmethod
    def part_of_training(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keep how prompts are presented, and drop their `source`: the prompts to answer are given otherwise."""
        prompts = values.get("prompts")
        if not isinstance(prompts, dict):
            return dict(values)
        return {**values, "prompts": {key: value for key, value in prompts.items() if key != "source"}}


class EvalConfig(_OnEngine):
    """The configuration of `tailrace eval`."""

    prompts: EvaluatedPromptsConfig = EvaluatedPromptsConfig()
    rewards: RewardsConfig
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @classmethod
    def part_of_training(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the default of `held_out` of a run, which holds out prompts unless its recipe says otherwise."""
        prompts = values.get("prompts")
        held_out = PromptsConfig.model_fields["held_out"].default
        return {**values, "prompts": {"held_out": held_out, **prompts}} if isinstance(prompts, dict) else dict(values)


class ServeConfig(_OnEngine):
    """The configuration of `tailrace serve`."""

    sampling: SamplingConfig = SamplingConfig()
    """Of a recipe, where one is given; each request has its own."""
    most_prompts: Count = 1024
    """Responses that are generated at a time; further requests are refused (429)."""
    most_body: Count = 8 * 2**20
    """Bytes of a body; larger ones are refused (413)."""
    limit_s: Seconds = 600.0
    """Seconds of a request; then it is ended (504)."""


class ProfileConfig(_OnEngine):
    """The configuration of `tailrace profile engine`."""

    batch_sizes: Annotated[Listed[Batch], Field(min_length=1)] = (1, 8, 32, 64)
    """Numbers of sequences that decode together; each is measured by itself."""
    prompt_tokens: Count = 64
    """Number of random tokens of each prompt."""
    new_tokens: Annotated[int, Field(ge=2, le=10**9)] = 64
    """Tokens of each response. All but the first come from steps that only decode; those steps are reported."""


class TPProfileConfig(_OnEngine):
    """The configuration of `tailrace profile tp`."""

    engine: NativeEngineConfig = NativeEngineConfig()
    """The engine to profile. By default it has as many ranks as the machine has cores, but at least two."""
    degrees: Listed[Processes] | None = None
    """TP degrees to measure, two or more divisors of dp · tp; by default those of engine.adaptive_tp, or else all that
    the model can be split into."""
    token_budget: Count | None = None
    """Maximum number of cached tokens of a replica; by default what the cache holds, up to 16384. Times beyond that are
    extrapolated."""
    max_batch_size: Batch | None = None
    """Maximum number of sequences that a replica decodes together; by default that of the engine."""
    max_length: Count | None = None
    """Maximum number of tokens of a sequence; by default what the context has room for, up to 2048."""
    points: Annotated[int, Field(ge=3, le=10000)] = 36
    """Maximum number of pairs of batch size and length, which are measured under each degree. Batch sizes, up to a
    third of these, are those at which the time of a step bends."""
    steps: Count = 6
    """Number of decode steps of each measurement."""
    rounds: Count = 7
    """How often everything is measured. Short measurements that are far apart tell the machine's pace from that of its
    neighbours: the lower quartile of the rounds counts."""
    output: PathText | None = None
    """File of the profile; by default that of engine.adaptive_tp.profile, or else the one in Tailrace's cache where
    engines with adaptive_tp look for it."""

    @field_validator("engine", mode="before")
    @classmethod
    def _of_several_ranks(cls, engine: Any) -> Any:
        """Fill in a rank for each core where neither dp nor tp is given, and mark the ranks as rearranged, for the
        check of `link`."""
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
    def asked_degrees(self) -> tuple[int, ...] | None:
        """The degrees that are asked for; None: all that the model can be split into."""
        adaptive_tp = self.engine.adaptive_tp
        return self.degrees or (None if adaptive_tp is None else adaptive_tp.degrees)

    @property
    def all_degrees(self) -> tuple[int, ...]:
        """The degrees to measure, ascending; by default all divisors of dp · tp, some of which a model may not
        allow."""
        return tuple(sorted(set(self.asked_degrees or self.engine.divisors)))

    @property
    def file(self) -> str | None:
        """The file that is asked for; None: the one in Tailrace's cache."""
        adaptive_tp = self.engine.adaptive_tp
        return self.output or (None if adaptive_tp is None else adaptive_tp.profile)
