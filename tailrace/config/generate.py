"""Schemas of the commands that use an engine without training: `tailrace generate` and `tailrace profile engine`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from tailrace.config.base import Config
from tailrace.config.engine import EngineConfig, NativeEngineConfig, SamplingConfig
from tailrace.config.model import ModelConfig
from tailrace.config.prompts import AnySource, Presentation


class _OnEngine(Config):
    """A model in an engine on a device."""

    seed: int = 0
    """Fixes every random choice."""
    device: str = "cpu"
    """A torch device; only cpu has been tested."""
    threads: PositiveInt | None = None
    """Threads of torch; the machine's cores by default."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = NativeEngineConfig()


class GeneratePromptsConfig(Presentation):
    """What is to be answered, unless the prompts are given as arguments."""

    source: AnySource | None = Field(default=None, discriminator="type")
    """Where prompts come from."""


class GenerateConfig(_OnEngine):
    """One `tailrace generate`."""

    samples: PositiveInt = 1
    """Responses to each prompt."""
    order: Literal["first_in", "longest_first"] = "first_in"
    """Which requests start first: those of the first prompts, or those with the largest `expected_tokens`, a column of
    the prompts."""
    prompts: GeneratePromptsConfig = GeneratePromptsConfig()
    sampling: SamplingConfig = SamplingConfig()


class ProfileConfig(_OnEngine):
    """One `tailrace profile engine`."""

    batch_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 8, 32, 64)
    """Sequences that decode together; each is measured by itself."""
    prompt_tokens: PositiveInt = 64
    """Random tokens of each prompt."""
    new_tokens: Annotated[int, Field(ge=2)] = 64
    """Of each response. All but the first come from steps that only decode, which are the ones reported."""
