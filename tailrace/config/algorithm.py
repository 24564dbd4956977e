"""Schemas of algorithms."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tailrace.config.base import Batch, Config, Count, CountFromZero, Keywords, PathText

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]


class AdaptiveKl(Config):
    """The coefficient follows the divergence: it grows while that is above a target, and shrinks while it is below."""

    target: Annotated[float, Field(ge=1e-9, le=1000)]
    """The mean divergence to aim at, in nats per token, as `ref_kl` tells it."""
    gain: Annotated[float, Field(ge=1e-6, le=1)] = 0.1
    """How quickly the coefficient follows: a step changes it by at most a fifth of this part."""


class KlConfig(Config):
    """A penalty on the divergence from the frozen initial weights."""

    coefficient: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the penalty; 0 computes no reference log-probabilities at all."""
    adaptive: AdaptiveKl | None = None
    """The coefficient is only the first one, and follows the divergence; null keeps it."""
    estimator: KlEstimator = "k3"
    """Estimator of the divergence. k1 is the log-ratio: as a penalty its mean gradient is 0, so it only reports. k2 is
    half its square. k3 is unbiased and non-negative."""
    part_of: Literal["loss", "reward"] = "loss"
    """loss: added to the policy loss of each token. reward: subtracted from the reward before advantages are computed,
    with the log-probabilities of the engine."""

    @model_validator(mode="after")
    def _adapts_from_something(self) -> Self:
        if self.adaptive is not None and not self.coefficient:
            raise ValueError("coefficient 0 stays 0 with adaptive; give the first coefficient, such as 0.01")
        return self


RatioLevel = Literal["token", "geometric", "sequence"]
Lower = Annotated[float, Field(ge=0, le=1)]
Upper = Annotated[float, Field(ge=1, le=1e6)]


class NoCorrection(Config):
    """Every token counts the same, whichever weights made it. This is the default with pipeline.max_staleness 0."""

    type: Literal["none"] = "none"


class _Weighted(Config):
    level: RatioLevel = "token"
    """What has a ratio. token: each token. geometric: all tokens of a response have the geometric mean of their ratios.
    sequence: all have the product, which has the least bias and the most variance."""


class TruncatedCorrection(_Weighted):
    """Truncated importance sampling. The policy loss of a token is multiplied by a factor up to a limit. The factor is
    the ratio of its probability under the weights at the start of the step to that under the weights that sampled it.
    This is the default with a larger pipeline.max_staleness."""

    type: Literal["truncated"] = "truncated"
    limit: Upper = 2.0
    """The largest factor. A lower limit bounds the variance more, and leaves more of the bias."""


class MaskedCorrection(_Weighted):
    """Masked importance sampling. The policy loss of a token is multiplied by that ratio where it is within two bounds,
    and by 0 elsewhere. Such a token still counts in what the loss is divided by; see rollout_rejection."""

    type: Literal["masked"] = "masked"
    lower: Lower = 0.5
    """The least ratio that is not masked; 0 is no bound."""
    upper: Upper = 5.0
    """The greatest ratio that is not masked."""


RolloutCorrection = NoCorrection | TruncatedCorrection | MaskedCorrection


class RatioBounds(Config):
    """Bounds on the ratio: the probability under the weights at the start of the step over that under the weights that
    sampled."""

    type: Literal["ratio"] = "ratio"
    level: RatioLevel = "sequence"
    """What has a ratio. sequence: a response, the product of its tokens' ratios. geometric: a response, their geometric
    mean. token: each token, which alone is rejected."""
    lower: Lower = 0.5
    """The least ratio that is trained on; 0 is no bound."""
    upper: Upper = 2.0
    """The greatest ratio that is trained on."""


class KlBound(Config):
    """A bound on the estimated divergence of the weights that sampled from those at the start of the step."""

    type: Literal["kl"] = "kl"
    estimator: KlEstimator = "k3"
    """Estimator of the divergence; k1 may be negative, k2 and k3 cannot."""
    level: RatioLevel = "geometric"
    """What has a divergence. geometric: a response, the mean over its tokens. sequence: a response, their sum. token:
    each token, which alone is rejected."""
    upper: Annotated[float, Field(ge=1e-30, le=1e6)] = 0.01
    """The greatest divergence that is trained on, in nats."""


RolloutRejection = RatioBounds | KlBound


class _Algorithm(Config):
    def resolved(self, *, max_staleness: int, max_new_tokens: int) -> Self:
        """The section with its open values chosen for a run; by default it has none."""
        return self


class PolicyGradientConfig(_Algorithm):
    """The keys of all algorithms with a policy loss of tokens."""

    group_size: Batch = 8
    """Number of samples of a prompt."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0, le=1e6)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are aggregated into one number."""
    loss_norm_tokens: Count | None = None
    """With loss_agg_mode seq-mean-token-sum-norm, what each response's sum is divided by; by default
    sampling.max_new_tokens."""
    kl: KlConfig = KlConfig()
    rollout_correction: RolloutCorrection | None = Field(default=None, discriminator="type")
    """Correction for responses that were sampled by other weights than those they train. By default it is truncated
    where pipeline.max_staleness lets that happen, and none at 0."""
    rollout_rejection: RolloutRejection | None = Field(default=None, discriminator="type")
    """Responses, or tokens, that are too far off the policy to be trained on. They count for nothing, also in what the
    loss is divided by. By default none is."""

    def resolved(self, *, max_staleness: int, max_new_tokens: int) -> Self:
        """The section with a correction for stale responses, and the number of tokens to divide by, where open."""
        open_values: dict[str, Any] = {}
        if self.rollout_correction is None:
            open_values["rollout_correction"] = TruncatedCorrection() if max_staleness else NoCorrection()
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_norm_tokens is None:
            open_values["loss_norm_tokens"] = max_new_tokens
        return self.model_copy(update=open_values) if open_values else self


class _OfGroups(PolicyGradientConfig):
    @field_validator("group_size")
    @classmethod
    def _needs_a_group(cls, group_size: int) -> int:
        if group_size < 2:
            raise ValueError(
                f"is {group_size}: this algorithm compares the samples of a group, "
                f"and a lone sample's advantage is 0; use 2 or more"
            )
        return group_size


Eps = Annotated[float, Field(ge=1e-12, le=1)]


class GroupNormalizedConfig(_OfGroups):
    """The keys of algorithms with GRPO's advantages."""

    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    advantage_eps: Eps = 1e-6
    """Constant added to that standard deviation."""


class GrpoConfig(GroupNormalizedConfig):
    """Group Relative Policy Optimization (Shao et al. 2024)."""

    type: Literal["grpo"] = "grpo"


class DrGrpoConfig(_OfGroups):
    """GRPO done right: without the biases of dividing by lengths and deviations (Liu et al. 2025)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    loss_agg_mode: LossAggMode = "seq-mean-token-sum-norm"
    """How token losses are aggregated into one number."""


class RlooConfig(_OfGroups):
    """REINFORCE Leave-One-Out: a sample is compared with the others of its group (Ahmadian et al. 2024)."""

    type: Literal["rloo"] = "rloo"


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """REINFORCE++: advantages are normalized over all tokens of a training step (Hu et al. 2025)."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group_size: Batch = 1
    """Number of samples of a prompt; at least 2 with a baseline."""
    baseline: Literal["none", "group"] = "none"
    """group: the mean reward of a sample's group is subtracted first."""
    advantage_eps: Eps = 1e-8
    """Constant added to the variance of the step's tokens."""

    @model_validator(mode="after")
    def _baseline_needs_a_group(self) -> Self:
        if self.baseline == "group" and self.group_size < 2:
            raise ValueError(
                f"algorithm.group_size is {self.group_size}, and algorithm.baseline group needs several samples of a "
                "prompt; use 2 or more, or baseline none"
            )
        return self


class GspoConfig(GroupNormalizedConfig):
    """Group Sequence Policy Optimization: one ratio for all tokens of a response (Zheng et al. 2025)."""

    type: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """The ratio of a response is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0, le=1e6)] = 4e-4
    """The ratio of a response is clipped above 1 + clip_high."""
    loss_agg_mode: LossAggMode = "seq-mean-token-mean"
    """How token losses are aggregated into one number."""


class CispoConfig(GroupNormalizedConfig):
    """Clipped importance weights instead of clipped updates: every token keeps a gradient (MiniMax 2025)."""

    type: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The weight is clipped below 1 - clip_low; with 1 there is no bound below."""
    clip_high: Annotated[float, Field(ge=0, le=1e6)] = 0.28
    """The weight is clipped above 1 + clip_high."""


class DynamicSamplingConfig(Config):
    """Groups without signal, whose rewards are all equal, are thrown away, and other prompts take their places."""

    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 8
    """How often a place is given another prompt. After that it keeps a group without signal."""


class OverlongConfig(Config):
    """What becomes of responses that are as long as they may be, or nearly so."""

    penalty_tokens: CountFromZero = 0
    """The last tokens of sampling.max_new_tokens, over which a penalty of the reward rises linearly to
    penalty_factor. 0: there is none."""
    penalty_factor: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """The penalty of a response that has them all."""
    filter: bool = False
    """Responses that were cut off take no part in the loss. Their rewards count in their groups."""


class DapoConfig(GroupNormalizedConfig):
    """Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025)."""

    type: Literal["dapo"] = "dapo"
    clip_high: Annotated[float, Field(ge=0, le=1e6)] = 0.28
    """The ratio is clipped above 1 + clip_high."""
    dynamic_sampling: DynamicSamplingConfig | None = DynamicSamplingConfig()
    """Null keeps groups without signal."""
    overlong: OverlongConfig = OverlongConfig()
    max_response_tokens: Count | None = None
    """The length to which `overlong` refers; by default sampling.max_new_tokens."""

    def resolved(self, *, max_staleness: int, max_new_tokens: int) -> Self:
        """See `PolicyGradientConfig`; with the longest response."""
        found = super().resolved(max_staleness=max_staleness, max_new_tokens=max_new_tokens)
        if found.max_response_tokens is not None:
            return found
        return found.model_copy(update={"max_response_tokens": max_new_tokens})


class MaxRlConfig(_OfGroups):
    """Maximum likelihood reinforcement learning: rare right responses count more (Tajwar et al. 2026). For rewards of 0
    and 1."""

    type: Literal["max_rl"] = "max_rl"
    advantage_eps: Eps = 1e-6
    """Constant added to the mean reward of a group."""

    @field_validator("kl")
    @classmethod
    def _rewards_stay_positive(cls, kl: KlConfig) -> KlConfig:
        if kl.coefficient and kl.part_of == "reward":
            raise ValueError("has part_of reward, and max_rl needs rewards of 0 and 1; use part_of loss")
        return kl


class CriticConfig(Config):
    """The critic: a model with a value head, trained on the same steps as the policy with the trainer's settings."""

    path: PathText | None = None
    """Directory of its initial weights; by default the run's model. Its tokenizer must be the same."""
    lr: Annotated[float, Field(ge=1e-15, le=10)] = 1e-5
    """Peak learning rate of its AdamW."""
    warmup_steps: CountFromZero = 0
    """Number of its optimizer steps in which the learning rate rises linearly from 0."""
    clip: Annotated[float, Field(ge=1e-6, le=1e6)] | None = 0.5
    """How far a value may move from the one that the advantages were computed with, before its loss is clipped; null
    does not clip."""


Share = Annotated[float, Field(ge=0, le=1)]


class PpoConfig(PolicyGradientConfig):
    """Proximal Policy Optimization with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

    type: Literal["ppo"] = "ppo"
    group_size: Batch = 1
    """Number of samples of a prompt."""
    discount: Share = 1.0
    """The factor by which what a token later counts less, γ."""
    gae_lambda: Share = 0.95
    """λ of generalized advantage estimation, for the advantages. 1 trusts the reward alone, 0 the critic alone."""
    critic_gae_lambda: Share | None = None
    """λ of what the critic learns, as in VAPO, which has 1 here; by default gae_lambda."""
    length_adaptive: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """α of VAPO: a response of l tokens has 1 - 1 / (α l) for λ of its advantages, so that credit reaches the beginning
    of long ones. VAPO has 0.05; by default λ is the same for all."""
    normalize_advantages: bool = True
    """Normalize advantages over all tokens of a training step. With pipeline.streaming, training then waits for the
    last response of its step."""
    advantage_eps: Eps = 1e-8
    """Constant added to the variance of the step's tokens."""
    critic: CriticConfig = CriticConfig()


class AdapterAlgorithmConfig(_Algorithm):
    """Your own algorithm, see docs/algorithms.md. `f(group_size=…, **options)` makes it."""

    type: Literal["adapter"] = "adapter"
    path: str
    """Dotted path of `f`, such as my_package.my_algorithm.MyAlgorithm; the working directory is importable."""
    group_size: Batch = 8
    """Number of samples of a prompt."""
    options: Keywords = {}
    """Keyword arguments of `f`."""


AlgorithmConfig = Annotated[
    GrpoConfig
    | DrGrpoConfig
    | RlooConfig
    | ReinforcePlusPlusConfig
    | GspoConfig
    | CispoConfig
    | DapoConfig
    | MaxRlConfig
    | PpoConfig
    | AdapterAlgorithmConfig,
    Field(discriminator="type"),
]
