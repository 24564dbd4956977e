"""Lengths from what a language model makes of the prompt: ridge regression on its hidden states.

StreamRL (section 5.2) fine-tunes a small language model with a head that tells a length. Here the model stays as it is,
and the head alone is fitted, again and again while a run goes on. So it needs no training run of its own, and follows
the policy. The figures of `features` stand beside the hidden states.
"""

from collections.abc import Sequence

import numpy as np

from tailrace.planning.lengths.base import Asked, Encoder
from tailrace.planning.lengths.figures import Figures
from tailrace.planning.lengths.regression import Regression
from tailrace.planning.lengths.text import TextFigures


class HiddenStates(Regression):
    """Ridge regression on the hidden states of a model that has read the prompt."""

    name = "model"

    def __init__(self, encoder: Encoder, *, discount: float = 0.98) -> None:
        """`encoder`: called in `prepare` alone. `discount`: see `Ridge`."""
        self._figures, self._encoder = TextFigures(), encoder
        super().__init__(self._figures.size + encoder.size, tables=self._figures.tables, discount=discount)
        self.knowledge = f"hidden states of the model {encoder.identity}, {self._figures.knowledge}"

    def figures_of(self, prompts: Sequence[Asked]) -> Sequence[Figures]:
        """See `ByFigures`."""
        states = self._encoder([prompt.text for prompt in prompts])
        return list(np.column_stack([self._figures(prompts), states]))
