"""Lengths by regression on figures of the prompt, whatever these are."""

from collections.abc import Sequence
from itertools import groupby

import msgspec
import numpy as np

from tailrace.planning.lengths.base import UNKNOWN, Asked, Expectation, Finished
from tailrace.planning.lengths.figures import ByFigures
from tailrace.planning.lengths.ridge import Ridge, RidgeState, Solution


class Regression(ByFigures):
    """A linear function of the figures."""

    def __init__(self, figures: int, *, tables: Sequence[range], discount: float) -> None:
        """`figures`: of a prompt, of which the first is 1. `tables`, `discount`: see `Ridge`."""
        super().__init__()
        self._ridge = Ridge(figures, tables=tables, discount=discount)
        self._solution: Solution | None = None
        self._learned = self._solved = 0
        """How often something was learned, so far and before the solution."""

    def fit(self) -> None:
        """See `ByFigures`."""
        if (learned := self._learned) != self._solved:
            self._solution = self._ridge.solve()
            self._solved = learned

    def knows(self, prompt: Asked) -> bool:
        """See `LengthPredictor`. It takes all prompts for combinations of what it knows."""
        return self._solution is not None

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`."""
        return [self._expected(prompt) for prompt in prompts]

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
        self._learned += 1  # it is solved in `fit`

    def _expected(self, prompt: Asked) -> Expectation:
        solution, figures = self._solution, self._known.get(prompt.prompt_id)
        if solution is None:
            return Expectation.of(*UNKNOWN)
        if figures is None:
            return Expectation.of(solution.mean, solution.spread)
        return Expectation.of(float(figures @ solution.coefficients), solution.deviation)
