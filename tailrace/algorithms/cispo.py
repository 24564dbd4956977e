"""Clipped importance weights: CISPO, MiniMax 2025, "MiniMax-M1", section 3.1.

GRPO's advantages. The ratio is a clipped weight of the token's log-probability and has no gradient, so that no token
loses its gradient by clipping. The paper has no bound below.
"""

from typing import TYPE_CHECKING

from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs

if TYPE_CHECKING:
    from tailrace.algorithms.surrogates import Surrogate


class Cispo(Grpo):
    """See the module."""

    def surrogate(self, inputs: LossInputs) -> "Surrogate":
        """See `weight_clipped`."""
        from tailrace.algorithms.surrogates import weight_clipped

        return weight_clipped(inputs, clip_low=self.common.clip_low, clip_high=self.common.clip_high)
