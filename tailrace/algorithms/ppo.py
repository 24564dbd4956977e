"""Proximal Policy Optimization: Schulman et al. 2017; for language models Ouyang et al. 2022, section 3.5.

rollout    prompt_ids, seed                     → response_ids, response_mask, rollout_log_probs, …
reward     prompt, answer, response, …          → reward, reward_error, reward_parts
reference  prompt_ids, response_ids             → ref_log_probs, only with a KL penalty
values     prompt_ids, response_ids, mask       → values, by the critic
advantage  reward, mask, values                 → advantages, returns
actor      all of the above                     → weights
critic     response, mask, values, returns      → the critic's weights

The reward comes with the last token; a KL penalty of the reward is taken off at each token. Advantages are GAE's, the
loss is the clipped surrogate. The critic learns the returns, advantages + values. With `critic_gae_lambda` and
`length_adaptive` these are VAPO's (Yue et al. 2025, section 4).
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from tailrace.algorithms.advantages import whitened
from tailrace.algorithms.gae import adapted_lambda, gae
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.policy_gradient import PolicyGradient
from tailrace.algorithms.table import (
    Cells,
    Compute,
    Score,
    TableTask,
    Train,
    training_batches,
    whole_groups,
    whole_steps,
)
from tailrace.config.algorithm import PpoConfig

_POOL = "critic"
_SCORED = ("prompt_ids", "response_ids", "response_mask")


class Ppo(PolicyGradient):
    """See the module."""

    def __init__(self, config: PpoConfig) -> None:
        """`config`: the recipe's, with a rollout correction chosen."""
        super().__init__(config)
        self._config = config

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        """The table: that of `PolicyGradient`, with the tasks values and critic."""
        *before, advantage, actor = super().tasks
        values = TableTask(name="values", reads=_SCORED, writes=("values",), work=Score(of="critic"), pool=_POOL)
        critic = TableTask(
            name="critic",
            reads=(*_SCORED, "reward", "values", "returns"),
            work=Train(self.value_loss, self._config.critic),
            claims=training_batches,
            pool=_POOL,
        )
        return (*before, values, advantage, actor, critic)

    def advantage_task(self) -> TableTask:
        """The task that computes advantages and returns, of a step or of a group at a time."""
        of_step = self._config.normalize_advantages
        return TableTask(
            name="advantage",
            reads=(*self.advantages_read, "values"),
            writes=("advantages", "returns"),
            work=Compute(self.advantages, of="step" if of_step else "group"),
            claims=whole_steps if of_step else whole_groups,
            pool="reward",
        )

    def credit(self, rewards: Sequence[float]) -> list[float]:
        """The rewards; 0 where grading failed."""
        return [0.0 if np.isnan(reward) else reward for reward in rewards]

    def advantages(self, rows: Sequence[Cells]) -> list[Cells]:
        """The advantage and the return of each token. A row whose grading failed does not count."""
        config = self._config
        masks = [np.asarray(row["response_mask"]) * (not np.isnan(row["reward"])) for row in rows]
        of_policy, returns = [], []
        for row, mask, reward in zip(rows, masks, self.credit([row["reward"] for row in rows]), strict=True):
            tokens = int((mask > 0).sum())
            own = config.gae_lambda
            if config.length_adaptive is not None:
                own = adapted_lambda(tokens, config.length_adaptive)
            of_critic = config.gae_lambda if config.critic_gae_lambda is None else config.critic_gae_lambda
            rewards = -self.penalties(row)
            if tokens:
                rewards[np.flatnonzero(mask)[-1]] += reward
            estimate = partial(gae, rewards, row["values"], mask, discount=config.discount)
            of_policy.append(estimate(gae_lambda=own))
            returns.append(np.where(mask > 0, estimate(gae_lambda=of_critic) + row["values"], 0.0).astype(np.float32))
        if config.normalize_advantages:
            of_policy = whitened(of_policy, masks, eps=config.advantage_eps)
        return [{"advantages": a, "returns": r} for a, r in zip(of_policy, returns, strict=True)]

    def value_loss(self, inputs: LossInputs) -> LossOutput:
        """See `value_loss.value_loss`."""
        from tailrace.algorithms.value_loss import value_loss

        return value_loss(inputs, clip=self._config.critic.clip)
