"""What a predictor of lengths is."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from tailrace.types import WeightVersion

INTERVAL = 0.8
"""The share of responses that the interval of an expectation should hold."""
UNKNOWN = math.log(512), 1.0
"""The mean and deviation of log-lengths before there is a response: any would do, since it is the same for all."""
_CERTAIN = 1e-9
"""Below it a deviation, or a share, counts as 0."""
_WIDTH = 1.2815515594
"""Standard deviations on either side of the mean that hold so many of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt that is to be answered."""

    prompt_id: str
    """Stable across epochs and runs."""
    prompt_tokens: int
    text: str = ""
    task: str = ""
    """The name of its task; empty where none is known."""
    forced: int | None = None
    """The tokens that the response will have, where a trace is played."""

    @classmethod
    def of(cls, prompt_tokens: int, text: str, task: str) -> Self:
        """What is told of a prompt with this text, without special tokens; equal texts are one prompt."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return cls(prompt_id=digest, prompt_tokens=prompt_tokens, text=text, task=task)


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

    @property
    def deviation(self) -> float:
        """Of the logarithm of the length."""
        return math.log(self.high / self.low) / (2 * _WIDTH)

    @classmethod
    def together(cls, expectations: "Sequence[Expectation]") -> "Expectation":
        """What is expected of a response of which it is not known which of these it is: the mean."""
        mean = sum(one.tokens for one in expectations) / len(expectations)
        return cls(mean, min(one.low for one in expectations), max(one.high for one in expectations))

    def remaining(self, made: int, most: int) -> float:
        """Expected tokens that a response will still make, which has `made` so far and may make `most` more.

        The mean of the length's distribution beyond `made`: prior before a response begins, posterior while it runs.
        """
        mean, deviation = math.log(self.tokens), self.deviation
        if deviation < _CERTAIN:
            left = self.tokens - made
        elif made <= 0:
            left = math.exp(mean + deviation**2 / 2)
        else:
            outlived = (math.log(made) - mean) / deviation
            beyond = _above(outlived)
            if beyond < _CERTAIN:  # far beyond anything expected: it goes on about as long as it has
                left = made * deviation / max(outlived, 1.0)
            else:
                left = math.exp(mean + deviation**2 / 2) * _above(outlived - deviation) / beyond - made
        return max(1.0, min(left, float(most)))


def _above(deviations: float) -> float:
    """The share of a normal distribution that is so many standard deviations above its mean, or more."""
    return 0.5 * math.erfc(deviations / math.sqrt(2))


class Encoder(Protocol):
    """Makes figures of texts, for example the hidden states of a language model."""

    size: int
    """Figures of a text."""

    @property
    def identity(self) -> str:
        """The same for those that make the same figures."""
        ...

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return [n, size] figures of n texts. This may take long."""
        ...


class LengthPredictor(Protocol):
    """Predicts lengths, and learns from those of finished responses."""

    name: str
    scouts: bool
    """Whether it needs one response of each group before it can tell groups apart."""
    knowledge: str
    """What it learns from. Predictors with the same one can go on from each other's state."""
    tells_samples_apart: bool
    """Whether it expects different lengths of the samples of a group."""

    def prepare(self, prompts: Sequence[Asked]) -> None:
        """Do the slow work that expecting these prompts needs. A thread may do it, beside all other calls."""
        ...

    def knows(self, prompt: Asked) -> bool:
        """Whether it has met responses to this prompt."""
        ...

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """Return an expectation for a response to each prompt."""
        ...

    def suppose(self, prompt: Asked, tokens: float) -> Expectation:
        """Return an expectation for a prompt, if it had a response of so many tokens, too. Nothing is learned."""
        ...

    def learn(self, finished: Sequence[Finished]) -> None:
        """Take in responses, those of older versions first."""
        ...

    def state(self) -> bytes:
        """Return what it has learned."""
        ...

    def restore(self, state: bytes) -> None:
        """Go on from what another predictor of this kind has learned.

        Raises:
            ValueError: it is no such state.
        """
        ...
