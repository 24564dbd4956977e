"""Lengths from what a language model makes of the prompt: ridge regression on its hidden states.

StreamRL (section 5.2) fine-tunes a small language model with a head that tells a length. Here the model stays as it is,
and the head alone is fitted, again and again while a run goes on. So it needs no training run of its own, and follows
the policy.
"""

import math
from collections.abc import Sequence

import numpy as np

from tailrace.planning.lengths.base import Asked, Encoder
from tailrace.planning.lengths.figures import Figures
from tailrace.planning.lengths.regression import Regression

_PLAIN = 2
"""Figures beside the hidden states: 1, and the logarithm of the tokens."""


class HiddenStates(Regression):
    """Ridge regression on the hidden states of a model that has read the prompt."""

    name = "model"

    def __init__(self, encoder: Encoder, *, discount: float = 0.98) -> None:
        """`encoder`: called in `prepare` alone. `discount`: see `Ridge`."""
        super().__init__(_PLAIN + encoder.size, discount=discount)
        self._encoder = encoder
        self.knowledge = f"hidden states of the model {encoder.identity}"

    def figures_of(self, prompts: Sequence[Asked]) -> Sequence[Figures]:
        """See `ByFigures`."""
        plain = np.array([(1.0, math.log(1 + prompt.prompt_tokens)) for prompt in prompts], np.float32)
        return list(np.column_stack([plain, self._encoder([prompt.text for prompt in prompts])]))
