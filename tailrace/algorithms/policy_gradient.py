"""What algorithms that need no critic have in common: the table of tasks, and the policy loss.

rollout    prompt_ids, seed                     → response_ids, response_mask, rollout_log_probs, …
reward     prompt, answer, response, …          → reward, reward_error, reward_parts
reference  prompt_ids, response_ids             → ref_log_probs, only with a KL penalty
advantage  reward and mask, with a penalty of
           the reward also both log_probs       → advantages
actor      all of the above                     → weights

A subclass says what a sample is credited with, and may have another surrogate than the clipped one.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.table import REFERENCE, REWARD, ROLLOUT, Cells, TableTask, actor, compute
from tailrace.config.algorithm import NoCorrection, PolicyGradientConfig

if TYPE_CHECKING:
    from tailrace.algorithms.surrogates import Surrogate


class PolicyGradient(Algorithm):
    """An algorithm whose advantages come from rewards, and whose loss is a surrogate of tokens."""

    def __init__(self, config: PolicyGradientConfig) -> None:
        """`config`: the recipe's, with a rollout correction chosen."""
        self.common = config

    @property
    def group_size(self) -> int:
        """The recipe's group size."""
        return self.common.group_size

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        """The table: rollout, reward, reference (only with a KL penalty), advantage, actor."""
        if not self.common.kl.coefficient:
            return (ROLLOUT, REWARD, self.advantage_task(), actor(self.loss))
        read = ("ref_log_probs", *self._coefficient_column)
        return (ROLLOUT, REWARD, REFERENCE, self.advantage_task(), actor(self.loss, *read))

    def advantage_task(self) -> TableTask:
        """The task that computes advantages, of a group at a time."""
        return compute("advantage", self.advantages, reads=self.advantages_read, writes=("advantages",))

    @property
    def advantages_read(self) -> tuple[str, ...]:
        """The columns that advantages are computed from."""
        kl = self.common.kl
        penalized = bool(kl.coefficient) and kl.part_of == "reward"
        of_penalty = ("rollout_log_probs", "ref_log_probs", *self._coefficient_column)
        return ("reward", "response_mask", *(of_penalty if penalized else ()))

    @property
    def _coefficient_column(self) -> tuple[str, ...]:
        return () if self.common.kl.adaptive is None else ("kl_coefficient",)

    @abstractmethod
    def credit(self, rewards: Sequence[float]) -> list[float]:
        """The advantage of each sample of a group. NaN is the reward of one whose grading failed; it gets 0."""

    def advantages(self, rows: Sequence[Cells]) -> list[Cells]:
        """The advantage of each row of a group, on every token."""
        rewards = [float(row["reward"]) - float(self.penalties(row).sum()) for row in rows]
        return [
            {"advantages": np.full(len(row["response_mask"]), advantage, np.float32)}
            for row, advantage in zip(rows, self.credit(rewards), strict=True)
        ]

    def penalties(self, row: Cells) -> npt.NDArray[np.float64]:
        """[R] what each token of a row loses of its reward for its divergence from the initial weights.

        The estimate is that of the recipe, with the log-probabilities of the engine. It is 0 outside the mask. In fp64,
        since the penalties of a long response are added up.
        """
        kl, mask = self.common.kl, np.asarray(row["response_mask"])
        if not kl.coefficient or kl.part_of == "loss":
            return np.zeros(len(mask))
        import torch

        from tailrace.algorithms.kl import kl_estimate

        policy, reference = (
            torch.tensor(row[name], dtype=torch.float64) for name in ("rollout_log_probs", "ref_log_probs")
        )
        estimate = kl_estimate(policy, reference, kl.estimator).numpy()
        coefficient = kl.coefficient if kl.adaptive is None else row["kl_coefficient"]
        return np.where(mask > 0, coefficient * estimate, 0.0)

    def surrogate(self, inputs: LossInputs) -> "Surrogate":
        """The loss of each token: the clipped surrogate."""
        from tailrace.algorithms.surrogates import clipped

        return clipped(inputs, clip_low=self.common.clip_low, clip_high=self.common.clip_high)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The surrogate, with the penalty, the correction and the aggregation of the recipe."""
        from tailrace.algorithms.losses import policy_loss

        config = self.common
        return policy_loss(
            inputs,
            self.surrogate,
            mode=config.loss_agg_mode,
            kl=config.kl,
            correction=config.rollout_correction or NoCorrection(),
            rejection=config.rollout_rejection,
            norm_tokens=config.loss_norm_tokens,
        )
