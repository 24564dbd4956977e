"""Lengths by regression on figures of the prompt, whatever these are."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.planning.lengths.base import UNKNOWN, Asked, Expectation, Finished
from tailrace.planning.lengths.ridge import Ridge, RidgeState, Solution

_KEPT = 2**15
"""Prompts whose figures are kept: those of an epoch are asked for again in the next."""

Figures = npt.NDArray[np.float32]


def newest(known: Mapping[str, Figures], found: Iterable[tuple[str, Figures]]) -> dict[str, Figures]:
    """Add what was found of prompts to what is known. The oldest are forgotten where there are too many."""
    both = {**known, **dict(found)}
    return dict(islice(both.items(), max(0, len(both) - _KEPT), None))


class Regression(ABC):
    """Expects a prompt's length from its figures. It finds them, and solves for the coefficients, in `prepare`.

    So neither makes a run wait. A prompt that was not prepared is expected to be like all others, and is not learned
    from.
    """

    name: str
    knowledge: str
    scouts = False
    tells_samples_apart = False

    def __init__(self, figures: int, *, discount: float) -> None:
        """`figures`: of a prompt, of which the first is 1. `discount`: see `Ridge`."""
        self._ridge = Ridge(figures, discount=discount)
        self._known: dict[str, Figures] = {}
        """By prompt."""
        self._solution: Solution | None = None
        self._learned = self._solved = 0
        """How often something was learned, so far and before the solution."""

    @abstractmethod
    def figures_of(self, prompts: Sequence[Asked]) -> Sequence[Figures]:
        """Return [figures] of each prompt."""

    def prepare(self, prompts: Sequence[Asked]) -> None:
        """See `LengthPredictor`."""
        new = {prompt.prompt_id: prompt for prompt in prompts if prompt.prompt_id not in self._known}
        if new:
            self._known = newest(self._known, zip(new, self.figures_of(list(new.values())), strict=True))
        if (learned := self._learned) != self._solved:
            self._solution = self._ridge.solve()
            self._solved = learned

    def knows(self, prompt: Asked) -> bool:
        """See `LengthPredictor`. It takes all prompts for combinations of what it knows."""
        return self._solution is not None

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`."""
        return [self._expected(prompt) for prompt in prompts]

    def suppose(self, prompt: Asked, tokens: float) -> Expectation:
        """See `LengthPredictor`. It knows prompts by their figures alone, so one more response changes nothing."""
        return self._expected(prompt)

    def learn(self, finished: Sequence[Finished]) -> None:
        """See `LengthPredictor`."""
        known = [response for response in finished if response.asked.prompt_id in self._known]
        for version, of_version in groupby(known, key=lambda response: response.version):
            responses = list(of_version)
            ids = [response.asked.prompt_id for response in responses]
            figures = np.stack([self._known[prompt_id] for prompt_id in ids]).astype(np.float64)
            self._ridge.learn(ids, figures, np.log([response.tokens for response in responses]), version)
            self._learned += 1

    def state(self) -> bytes:
        """See `LengthPredictor`."""
        return msgspec.msgpack.encode(self._ridge.state())

    def restore(self, state: bytes) -> None:
        """See `LengthPredictor`."""
        self._ridge.restore(msgspec.msgpack.decode(state, type=RidgeState))
        self._learned += 1  # it is solved in `prepare`

    def _expected(self, prompt: Asked) -> Expectation:
        solution, figures = self._solution, self._known.get(prompt.prompt_id)
        if solution is None:
            return Expectation.of(*UNKNOWN)
        if figures is None:
            return Expectation.of(solution.mean, solution.spread)
        return Expectation.of(float(figures @ solution.coefficients), solution.deviation)
