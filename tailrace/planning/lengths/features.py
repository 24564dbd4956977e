"""Lengths from the prompt itself: its length and its words, by ridge regression.

Words are counted in a table of fixed size (Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask
Learning"), so that any prompt can be predicted without a vocabulary.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tailrace.planning.lengths.base import Asked
from tailrace.planning.lengths.figures import Figures
from tailrace.planning.lengths.regression import Regression

_WORDS = re.compile(r"\d+|\w+|[^\w\s]")
_PLAIN = 6
"""Figures beside the words: 1, the logarithms of the tokens, of the text's letters, lines and numbers, and the share of
digits."""


class Features(Regression):
    """Ridge regression on figures of the prompt."""

    name = "features"

    def __init__(self, *, words: int = 256, discount: float = 0.98) -> None:
        """`words`: places of the table of words. `discount`: see `Ridge`."""
        super().__init__(_PLAIN + words, discount=discount)
        self._words = words
        self.knowledge = f"{_PLAIN} figures and {words} words"

    def figures_of(self, prompts: Sequence[Asked]) -> Sequence[Figures]:
        """See `ByFigures`."""
        return [text_figures(prompt, self._words) for prompt in prompts]


def text_figures(prompt: Asked, places: int) -> Figures:
    """[6 + places] figures of a prompt."""
    figures = np.zeros(_PLAIN + places, np.float32)
    letters = len(prompt.text)
    digits = sum(map(str.isdigit, prompt.text)) / letters if letters else 0.0
    words = Counter(f"number {len(w)}" if w.isdigit() else w.lower() for w in _WORDS.findall(prompt.text))
    numbers = sum(count for word, count in words.items() if word.startswith("number "))
    lines = prompt.text.count("\n")
    figures[:_PLAIN] = 1.0, *(math.log(1 + n) for n in (prompt.prompt_tokens, letters, lines, numbers)), digits
    for word, number in words.items():
        figures[_PLAIN + _place(word, places)] += math.log(1 + number)
    return figures


def _place(word: str, places: int) -> int:
    """The place of a word in the table; the same in every process."""
    return zlib.crc32(word.encode()) % places
