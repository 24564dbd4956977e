"""Group Relative Policy Optimization: Shao et al. 2024, "DeepSeekMath", section 4.1.

rollout    prompt_ids, seed                     → response_ids, response_mask, rollout_log_probs, …
reward     prompt, answer, response, …          → reward, reward_error, reward_parts
reference  prompt_ids, response_ids             → ref_log_probs, only with a KL penalty
advantage  reward and mask of a whole group     → advantages
actor      all of the above                     → weights
"""

from collections.abc import Sequence

import numpy as np

from tailrace.algorithms.advantages import group_normalized
from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.table import REFERENCE, REWARD, ROLLOUT, Cells, TableTask, actor, compute
from tailrace.config.algorithm import GrpoConfig, NoCorrection


class Grpo(Algorithm):
    """GRPO with separate clip bounds, three ways to aggregate, an optional KL penalty and rollout correction."""

    def __init__(self, config: GrpoConfig) -> None:
        """`config`: the recipe's, with a rollout correction chosen."""
        self._config = config

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        """The table: rollout, reward, reference (only with a KL penalty), advantage, actor."""
        advantage = compute("advantage", self.advantages, reads=("reward", "response_mask"), writes=("advantages",))
        if self._config.kl.coefficient > 0:
            return (ROLLOUT, REWARD, REFERENCE, advantage, actor(self.loss, "ref_log_probs"))
        return (ROLLOUT, REWARD, advantage, actor(self.loss))

    @property
    def group_size(self) -> int:
        """The recipe's group size."""
        return self._config.group_size

    def advantages(self, rows: Sequence[Cells]) -> list[Cells]:
        """The advantage of each row of a group, on every token.

        A row with a NaN reward (grading failed) is left out and gets 0.
        """
        config = self._config
        rewards = [float(row["reward"]) for row in rows]
        advantages = group_normalized(rewards, normalize_std=config.normalize_std, eps=config.advantage_eps)
        return [
            {"advantages": np.full(len(row["response_mask"]), advantage, np.float32)}
            for row, advantage in zip(rows, advantages, strict=True)
        ]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The clipped surrogate, with the penalty and the correction of the recipe."""
        from tailrace.algorithms.losses import clipped_policy_loss

        config = self._config
        return clipped_policy_loss(
            inputs,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            mode=config.loss_agg_mode,
            kl=config.kl,
            correction=config.rollout_correction or NoCorrection(),
        )
