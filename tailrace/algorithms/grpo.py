"""Group Relative Policy Optimization: Shao et al. 2024, "DeepSeekMath", section 4.1.

rollout    prompt_ids, seed                     → response_ids, response_mask, rollout_log_probs, …
reward     prompt, answer, response, …          → reward, reward_error, reward_parts
reference  prompt_ids, response_ids             → ref_log_probs, only with a KL penalty
advantage  reward and mask of a whole group     → advantages
actor      all of the above                     → weights
"""

from collections.abc import Sequence

from tailrace.algorithms.advantages import group_normalized
from tailrace.algorithms.base import Algorithm, LossInputs, LossOutput
from tailrace.config.algorithm import GrpoConfig, NoCorrection
from tailrace.types import TaskSpec

ROLLOUT = TaskSpec(
    name="rollout",
    reads=("prompt_ids", "seed"),
    writes=("response_ids", "response_mask", "rollout_log_probs", "weight_versions", "response", "finish_reason"),
)
REWARD = TaskSpec(
    name="reward",
    reads=("prompt", "question", "answer", "metadata", "response", "response_ids", "finish_reason"),
    writes=("reward", "reward_error", "reward_parts"),
)
REFERENCE = TaskSpec(name="reference", reads=("prompt_ids", "response_ids"), writes=("ref_log_probs",))
ADVANTAGE = TaskSpec(name="advantage", reads=("reward", "response_mask"), writes=("advantages",))


class Grpo(Algorithm):
    """GRPO with separate clip bounds, three ways to aggregate, an optional KL penalty and rollout correction."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    @property
    def tasks(self) -> tuple[TaskSpec, ...]:
        reference = (REFERENCE,) if self.needs_reference else ()
        return (ROLLOUT, REWARD, *reference, ADVANTAGE, self._actor)

    @property
    def group_size(self) -> int:
        return self._config.group_size

    @property
    def needs_reference(self) -> bool:
        return self._config.kl.coefficient > 0

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return group_normalized(rewards, normalize_std=self._config.normalize_std, eps=self._config.advantage_eps)

    def loss(self, inputs: LossInputs) -> LossOutput:
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

    @property
    def _actor(self) -> TaskSpec:
        reference = ("ref_log_probs",) if self.needs_reference else ()
        for_people = ("prompt", "answer")  # beside the response, in samples.jsonl
        made = (*ROLLOUT.writes, *REWARD.writes, "advantages", *reference)
        return TaskSpec(name="actor", reads=("prompt_ids", *for_people, *made))
