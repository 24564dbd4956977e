"""Group Sequence Policy Optimization: Zheng et al. 2025, section 4.

GRPO's advantages. All tokens of a response have one ratio, the geometric mean of theirs, and are clipped together. Such
ratios are nearer to 1 than those of tokens, so the bounds are tighter.
"""

from typing import TYPE_CHECKING

from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs

if TYPE_CHECKING:
    from tailrace.algorithms.surrogates import Surrogate


class Gspo(Grpo):
    """See the module."""

    def surrogate(self, inputs: LossInputs) -> "Surrogate":
        """See `sequence_clipped`."""
        from tailrace.algorithms.surrogates import sequence_clipped

        return sequence_clipped(inputs, clip_low=self.common.clip_low, clip_high=self.common.clip_high)
