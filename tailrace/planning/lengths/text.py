"""Figures of a prompt that need no model: its length, its task and its words.

Words, and pairs of words that follow one another, are counted in a table of fixed size (Weinberger et al. 2009,
"Feature Hashing for Large Scale Multitask Learning"), so that any prompt can be predicted without a vocabulary. Counts
are added without the signs of that paper: so the table also tells how many different pairs there are. The name of the
task is at its place in a table of its own.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from tailrace.planning.lengths.base import Asked
from tailrace.planning.lengths.figures import Figures

_WORDS = re.compile(r"\d+|\w+|[^\w\s]")
_PLAIN = 6
"""Figures before the tables: 1, the logarithms of the tokens, of the text's letters, lines and numbers, and the share
of digits."""
_TASKS = 128
"""Places of the table of tasks."""


class TextFigures:
    """Makes figures of prompts, of which the first is 1."""

    def __init__(self, words: int = 256) -> None:
        """`words`: places of the table of words and pairs."""
        self._words = words
        tasks = _PLAIN + _TASKS
        self.size = tasks + words
        self.tables = range(_PLAIN, tasks), range(tasks, self.size)
        """The figures that are tables."""
        self.knowledge = f"{_PLAIN} figures, {_TASKS} tasks, and {words} words and pairs"
        """What the figures are, in words."""

    def __call__(self, prompts: Sequence[Asked]) -> list[Figures]:
        """Return [size] figures of each prompt."""
        return [self._of(prompt) for prompt in prompts]

    def _of(self, prompt: Asked) -> Figures:
        letters = len(prompt.text)
        digits = sum(map(str.isdigit, prompt.text)) / letters if letters else 0.0
        words = [f"number {len(word)}" if word.isdigit() else word.lower() for word in _WORDS.findall(prompt.text)]
        numbers = sum(word.startswith("number ") for word in words)
        lines = prompt.text.count("\n")
        plain = 1.0, *(math.log(1 + n) for n in (prompt.prompt_tokens, letters, lines, numbers)), digits
        pairs = map(" ".join, pairwise(words))
        tasks = _table([prompt.task] if prompt.task else [], _TASKS)
        return np.concatenate([np.array(plain, np.float32), tasks, _table([*words, *pairs], self._words)])


def _table(names: Iterable[str], places: int) -> Figures:
    """Count names at their places, which are the same in every process."""
    table = np.zeros(places, np.float32)
    for name, count in Counter(names).items():
        table[zlib.crc32(name.encode()) % places] += math.sqrt(count)
    return table
