"""Schema of evaluations."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from tailrace.config.base import LOWEST_TEMPERATURE, Config, Count


class EvaluationConfig(Config):
    """Evaluations: answers to the prompts that are not trained on, before, during and after training."""

    every: Count = 25
    """Steps between evaluations."""
    max_prompts: Count | None = None
    """Maximum number of prompts of each set; by default all."""
    greedy: bool = True
    """Answer each prompt once, with the most likely tokens."""
    samples: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Also answer each prompt this many times at random: for the mean accuracy, and from two samples on for pass@k and
    the majority vote maj@k."""
    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=1e6)] | None = None
    """Temperature of these samples; by default `sampling.temperature`. Their top_k, top_p and min_p are those of
    `sampling`."""

    @model_validator(mode="after")
    def _answers_somehow(self) -> Self:
        if not self.greedy and not self.samples:
            raise ValueError("has greedy: false and samples: 0, so nothing would be answered; set one of them")
        if self.temperature is not None and not self.samples:
            raise ValueError(f"has temperature {self.temperature:g} for no samples; set samples, or leave it out")
        return self
