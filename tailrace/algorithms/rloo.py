"""REINFORCE Leave-One-Out: Ahmadian et al. 2024, "Back to Basics", section 3.2.

A = r - mean of the rewards of the group's other samples, which is an unbiased baseline. The paper takes the KL penalty
off the reward: `algorithm.kl.part_of: reward`. Its gradient is that of the clipped surrogate at ratio 1.
"""

from collections.abc import Sequence

from tailrace.algorithms.advantages import leave_one_out
from tailrace.algorithms.policy_gradient import PolicyGradient


class Rloo(PolicyGradient):
    """See the module."""

    def credit(self, rewards: Sequence[float]) -> list[float]:
        """See `leave_one_out`."""
        return leave_one_out(rewards)
