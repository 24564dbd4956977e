"""Lengths from the prompt itself: its length, its task and its words, by ridge regression.

Words are counted in a table of fixed size (Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask
Learning"), so that any prompt can be predicted without a vocabulary. The logarithm of the length is linear in these
figures. Responses of older weights count less (recursive least squares with forgetting).
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tailrace.planning.lengths.base import Asked, Expectation, Finished
from tailrace.planning.lengths.effects import LEAST_RESPONSES
from tailrace.types import WeightVersion

_WORDS = re.compile(r"\d+|\w+|[^\w\s]")
_PLAIN = 4
"""Figures beside the words: 1, the logarithm of the tokens, of the text's letters, and the share of digits."""

Array = npt.NDArray[np.float64]


class Features:
    """Ridge regression on figures of the prompt."""

    name = "features"
    scouts = False
    tells_samples_apart = False

    def __init__(self, *, words: int = 256, penalty: float = 3.0, discount: float = 0.98) -> None:
        """Begin without knowledge.

        Args:
            words: places of the table of words and tasks.
            penalty: of squared coefficients, in responses; it does not hold for the mean.
            discount: the weight that a response keeps with each newer version.
        """
        self._words = words
        self._discount = discount
        size = _PLAIN + words
        self._penalty = np.diag([1e-9] + [penalty] * (size - 1))
        self._gram, self._moment = np.zeros((size, size)), np.zeros(size)
        self._squares = self._weight = 0.0
        """The weighted sum of squared log-lengths, and of the weights."""
        self._version: WeightVersion = 0
        self._responses = 0
        self._known: dict[str, Array] = {}
        """Figures by prompt: they are asked for in every epoch."""
        self._solved: tuple[Array, float] | None = None

    @property
    def ready(self) -> bool:
        """See `LengthPredictor`."""
        return self._responses >= LEAST_RESPONSES

    def knows(self, prompt: Asked) -> bool:
        """See `LengthPredictor`. It takes all prompts for combinations of known words."""
        return self.ready

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`."""
        if not prompts:
            return []
        coefficients, deviation = self._solution()
        means = np.stack([self._figures(prompt) for prompt in prompts]) @ coefficients
        return [Expectation.of(float(mean), deviation) for mean in means]

    def suppose(self, prompt: Asked, tokens: float) -> Expectation:
        """See `LengthPredictor`. It knows prompts by their figures alone, so one more response changes nothing."""
        return self.expect([prompt])[0]

    def learn(self, finished: Sequence[Finished]) -> None:
        """See `LengthPredictor`."""
        for version in sorted({response.version for response in finished}):
            self._age(version)
            batch = [response for response in finished if response.version == version]
            weight = self._discount ** (self._version - version)
            figures = np.stack([self._figures(response.asked) for response in batch])
            logs = np.log([response.tokens for response in batch])
            self._gram += weight * figures.T @ figures
            self._moment += weight * figures.T @ logs
            self._squares += weight * float(logs @ logs)
            self._weight += weight * len(batch)
            self._responses += len(batch)
        self._solved = None

    def _age(self, version: WeightVersion) -> None:
        if version > self._version:
            factor = self._discount ** (version - self._version)
            self._gram *= factor
            self._moment *= factor
            self._squares *= factor
            self._weight *= factor
            self._version = version

    def _solution(self) -> tuple[Array, float]:
        """The coefficients, and the deviation of log-lengths from what they give."""
        if (solved := self._solved) is None:
            penalized = self._gram + self._penalty
            coefficients = np.asarray(np.linalg.solve(penalized, self._moment), np.float64)
            left = self._squares + float(coefficients @ (self._gram @ coefficients - 2 * self._moment))
            used = float(np.trace(np.linalg.solve(penalized, self._gram)))  # degrees of freedom of a ridge regression
            freedom = max(1.0, self._weight - used)
            solved = self._solved = coefficients, math.sqrt(max(0.0, left) / freedom) if self._weight else 1.0
        return solved

    def _figures(self, prompt: Asked) -> Array:
        known = self._known.get(prompt.prompt_id)
        if known is None:
            known = self._known[prompt.prompt_id] = self._made(prompt)
        return known

    def _made(self, prompt: Asked) -> Array:
        """[4 + words] figures of a prompt."""
        figures = np.zeros(_PLAIN + self._words)
        letters = len(prompt.text)
        digits = sum(map(str.isdigit, prompt.text)) / letters if letters else 0.0
        figures[:_PLAIN] = 1.0, math.log(1 + prompt.prompt_tokens), math.log(1 + letters), digits
        words = Counter(f"number {len(w)}" if w.isdigit() else w.lower() for w in _WORDS.findall(prompt.text))
        if prompt.task:
            words[f"task {prompt.task}"] += 1
        for word, number in words.items():
            figures[_PLAIN + _place(word, self._words)] += math.log(1 + number)
        return figures


def _place(word: str, places: int) -> int:
    """The place of a word in the table; the same in every process."""
    return zlib.crc32(word.encode()) % places
