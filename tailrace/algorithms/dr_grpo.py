"""GRPO done right: Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.

A = r - mean of the group's rewards. Dividing by the deviation would weight prompts by their difficulty, and dividing by
a response's length would favour long wrong ones. So neither is done: the sum over a response's tokens is divided by one
constant for all responses.
"""

from collections.abc import Sequence

from tailrace.algorithms.advantages import group_normalized
from tailrace.algorithms.policy_gradient import PolicyGradient


class DrGrpo(PolicyGradient):
    """See the module. The constant is the longest response that may be sampled, unless the recipe has another one."""

    def credit(self, rewards: Sequence[float]) -> list[float]:
        """See `group_normalized`."""
        return group_normalized(rewards, normalize_std=False, eps=0.0)
