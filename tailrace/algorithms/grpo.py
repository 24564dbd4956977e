"""Group Relative Policy Optimization: Shao et al. 2024, "DeepSeekMath", section 4.1.

A = (r - mean) / (std + eps) of the group's rewards, the same for all tokens of a response, in the clipped surrogate.
"""

from collections.abc import Sequence

from tailrace.algorithms.advantages import group_normalized
from tailrace.algorithms.policy_gradient import PolicyGradient
from tailrace.config.algorithm import GroupNormalizedConfig


class Grpo(PolicyGradient):
    """GRPO with separate clip bounds, four ways to aggregate, an optional KL penalty and rollout correction."""

    def __init__(self, config: GroupNormalizedConfig) -> None:
        """`config`: the recipe's, with a rollout correction chosen."""
        super().__init__(config)
        self._config = config

    def credit(self, rewards: Sequence[float]) -> list[float]:
        """See `group_normalized`."""
        return group_normalized(rewards, normalize_std=self._config.normalize_std, eps=self._config.advantage_eps)
