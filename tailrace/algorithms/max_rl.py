"""Maximum likelihood reinforcement learning: Tajwar et al. 2026, algorithm 1.

A = (r - mean) / mean of the group's rewards of 0 and 1. In the mean this is the gradient of the likelihood of a right
response, up to the order of the group's size. The likelihood counts hard prompts more than the mean reward does.
"""

from collections.abc import Sequence

from tailrace.algorithms.advantages import mean_normalized
from tailrace.algorithms.policy_gradient import PolicyGradient
from tailrace.config.algorithm import MaxRlConfig


class MaxRl(PolicyGradient):
    """See the module."""

    def __init__(self, config: MaxRlConfig) -> None:
        """`config`: the recipe's, with a rollout correction chosen."""
        super().__init__(config)
        self._config = config

    def credit(self, rewards: Sequence[float]) -> list[float]:
        """See `mean_normalized`."""
        return mean_normalized(rewards, eps=self._config.advantage_eps)
