"""What a predictor of lengths is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tailrace.types import WeightVersion

INTERVAL = 0.8
"""The share of responses that the interval of an expectation should hold."""
_WIDTH = 1.2815515594
"""Standard deviations on either side of the mean that hold so many of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt that is to be answered."""

    prompt_id: str
    """Stable across epochs and runs."""
    prompt_tokens: int
    task: str = ""
    """Its source, or kind of task; empty where there is one."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A response that has ended by itself, or at the limit."""

    asked: Asked
    tokens: int
    version: WeightVersion
    """The oldest weight version that made a token of it."""


class Expectation(NamedTuple):
    """How long a response to a prompt will be, in tokens."""

    tokens: float
    """The median."""
    low: float
    high: float
    """Four of five responses should be between the two (`INTERVAL`)."""

    @classmethod
    def of(cls, mean: float, deviation: float) -> "Expectation":
        """The expectation of a length whose logarithm is normal."""
        wide = _WIDTH * deviation
        return cls(math.exp(mean), math.exp(mean - wide), math.exp(mean + wide))


class LengthPredictor(Protocol):
    """Predicts lengths, and learns from those of finished responses."""

    name: str
    scouts: bool
    """Whether it needs one response of each group before it can tell groups apart."""

    @property
    def ready(self) -> bool:
        """Whether it knows enough to tell prompts apart."""
        ...

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """Return an expectation for a response to each prompt."""
        ...

    def learn(self, finished: Sequence[Finished]) -> None:
        """Take in responses, those of older versions first."""
        ...
