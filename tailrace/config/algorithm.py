"""Schemas of algorithms."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator

from tailrace.config.base import Batch, Config, Keywords

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
KlEstimator = Literal["k1", "k2", "k3"]


class KlConfig(Config):
    """A penalty on the divergence from the frozen initial weights."""

    coefficient: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the penalty; 0 computes no reference log-probabilities at all."""
    estimator: KlEstimator = "k3"
    """Estimator of the divergence. k1 is the log-ratio: as a penalty its mean gradient is 0, so it only reports. k2 is
    half its square. k3 is unbiased and non-negative."""


class NoCorrection(Config):
    """Every token counts the same, whichever weights made it. This is the default with pipeline.max_staleness 0."""

    type: Literal["none"] = "none"


class TruncatedCorrection(Config):
    """Truncated importance sampling. The policy loss of a token is multiplied by a factor up to a limit: the
    probability under the weights at the start of the step over that under the weights that sampled the token. This is
    the default with a larger pipeline.max_staleness."""

    type: Literal["truncated"] = "truncated"
    limit: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """The largest factor. A lower limit bounds the variance more, and leaves more of the bias."""


RolloutCorrection = NoCorrection | TruncatedCorrection


class _Algorithm(Config):
    def resolved(self, max_staleness: int) -> Self:
        """The section with its open values chosen for a run of this staleness; by default it has none."""
        return self


class GrpoConfig(_Algorithm):
    """Group Relative Policy Optimization."""

    type: Literal["grpo"] = "grpo"
    group_size: Batch = 8
    """Number of samples of a prompt; at least 2."""
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    advantage_eps: Annotated[float, Field(ge=1e-12, le=1)] = 1e-6
    """Constant added to that standard deviation."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0, le=1e6)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are aggregated into one number."""
    kl: KlConfig = KlConfig()
    rollout_correction: RolloutCorrection | None = Field(default=None, discriminator="type")
    """Correction for responses that were sampled by other weights than those they train. By default it is truncated
    where pipeline.max_staleness lets that happen, and none at 0."""

    @field_validator("group_size")
    @classmethod
    def _needs_a_group(cls, group_size: int) -> int:
        if group_size < 2:
            raise ValueError(
                f"is {group_size}: GRPO compares the samples of a group, "
                f"and a lone sample's advantage is 0; use 2 or more"
            )
        return group_size

    def resolved(self, max_staleness: int) -> Self:
        """The section with a correction for stale responses chosen, where it is open."""
        if self.rollout_correction is not None:
            return self
        correction = TruncatedCorrection() if max_staleness else NoCorrection()
        return self.model_copy(update={"rollout_correction": correction})


class AdapterAlgorithmConfig(_Algorithm):
    """Your own algorithm, see docs/algorithms.md. `f(group_size=…, **options)` makes it."""

    type: Literal["adapter"] = "adapter"
    path: str
    """Dotted path of `f`, such as my_package.my_algorithm.MyAlgorithm; the working directory is importable."""
    group_size: Batch = 8
    """Number of samples of a prompt."""
    options: Keywords = {}
    """Keyword arguments of `f`."""


AlgorithmConfig = Annotated[GrpoConfig | AdapterAlgorithmConfig, Field(discriminator="type")]
