"""What predictors have in common that know a prompt by its figures alone."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from tailrace.planning.lengths.base import Asked, Expectation

_KEPT = 2**15
"""Prompts whose figures are kept: those of an epoch are asked for again in the next."""

Figures = npt.NDArray[np.float32]


class ByFigures(ABC):
    """Expects a prompt's length from its figures. It finds them, and fits what it has learned, in `prepare`.

    So neither makes a run wait. A prompt that was not prepared is expected to be like all others, and is not learned
    from.
    """

    name: str
    knowledge: str
    scouts = False
    tells_samples_apart = False

    def __init__(self) -> None:
        self._known: dict[str, Figures] = {}
        """By prompt; the oldest are forgotten where there are too many."""

    @abstractmethod
    def figures_of(self, prompts: Sequence[Asked]) -> Sequence[Figures]:
        """Return [figures] of each prompt."""

    @abstractmethod
    def fit(self) -> None:
        """Fit what was learned since the last time, where that is due. `prepare` calls it, in its thread."""

    @abstractmethod
    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`."""

    def prepare(self, prompts: Sequence[Asked]) -> None:
        """See `LengthPredictor`."""
        new = {prompt.prompt_id: prompt for prompt in prompts if prompt.prompt_id not in self._known}
        if new:
            known = self._known | dict(zip(new, self.figures_of(list(new.values())), strict=True))
            self._known = dict(islice(known.items(), max(0, len(known) - _KEPT), None))
        self.fit()

    def suppose(self, prompt: Asked, tokens: float) -> Expectation:
        """See `LengthPredictor`. It knows prompts by their figures alone, so one more response changes nothing."""
        return self.expect([prompt])[0]


def half_of(prompt_id: str) -> int:
    """Which of two halves of all prompts has this one, 0 or 1. What one half teaches is tried on the other."""
    return zlib.crc32(prompt_id.encode()) % 2
