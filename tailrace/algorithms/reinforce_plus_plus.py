"""REINFORCE++: Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization".

A = the reward that is still to come at a token, normalized over all tokens of a training step. A KL penalty of the
reward (`algorithm.kl.part_of: reward`) is taken off at each token. With `baseline: group` the mean reward of the group
comes off first; the paper puts the penalty into the loss there.
"""

from collections.abc import Sequence

import numpy as np

from tailrace.algorithms.advantages import group_normalized, whitened
from tailrace.algorithms.policy_gradient import PolicyGradient
from tailrace.algorithms.table import Cells, Compute, TableTask, whole_steps
from tailrace.config.algorithm import ReinforcePlusPlusConfig


class ReinforcePlusPlus(PolicyGradient):
    """See the module."""

    def __init__(self, config: ReinforcePlusPlusConfig) -> None:
        """`config`: the recipe's, with a rollout correction chosen."""
        super().__init__(config)
        self._config = config

    def advantage_task(self) -> TableTask:
        """The task that computes advantages, of all rows of a training step."""
        return TableTask(
            name="advantage",
            reads=self.advantages_read,
            writes=("advantages",),
            work=Compute(self.advantages, of="step"),
            claims=whole_steps,
            pool="reward",
        )

    def credit(self, rewards: Sequence[float]) -> list[float]:
        """The rewards less the baseline; 0 where grading failed."""
        if self._config.baseline == "group":
            return group_normalized(rewards, normalize_std=False, eps=0.0)
        return [0.0 if np.isnan(reward) else reward for reward in rewards]

    def advantages(self, rows: Sequence[Cells]) -> list[Cells]:
        """The advantage of each token of a step. A row whose grading failed does not count."""
        credits = self._credits(rows)
        masks = [np.asarray(row["response_mask"]) * (not np.isnan(row["reward"])) for row in rows]
        values = []
        for row, credit in zip(rows, credits, strict=True):
            to_come = np.cumsum(self.penalties(row)[::-1])[::-1]
            values.append(credit - to_come)
        normalized = whitened(values, masks, eps=self._config.advantage_eps)
        return [{"advantages": advantages} for advantages in normalized]

    def _credits(self, rows: Sequence[Cells]) -> list[float]:
        """The credit of each row, with those of a group together; groups are adjacent."""
        size = self.group_size
        rewards = [float(row["reward"]) for row in rows]
        return [one for start in range(0, len(rows), size) for one in self.credit(rewards[start : start + size])]
