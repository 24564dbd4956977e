"""Lengths from the prompt itself: its length, its task and its words, by ridge regression."""

from collections.abc import Sequence

from tailrace.planning.lengths.base import Asked
from tailrace.planning.lengths.figures import Figures
from tailrace.planning.lengths.regression import Regression
from tailrace.planning.lengths.text import TextFigures


class Features(Regression):
    """Ridge regression on figures of the prompt."""

    name = "features"

    def __init__(self, *, words: int = 256, discount: float = 0.98) -> None:
        """`words`: see `TextFigures`. `discount`: see `Ridge`."""
        self._figures = TextFigures(words)
        super().__init__(self._figures.size, tables=self._figures.tables, discount=discount)
        self.knowledge = self._figures.knowledge

    def figures_of(self, prompts: Sequence[Asked]) -> Sequence[Figures]:
        """See `ByFigures`."""
        return self._figures(prompts)
