"""Schemas of algorithms."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tailrace.config.base import Batch, Config, Keywords

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
KlEstimator = Literal["k1", "k2", "k3"]


class KlConfig(Config):
    """A penalty on the divergence from the frozen initial weights."""

    coefficient: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """0 computes no reference log-probabilities at all."""
    estimator: KlEstimator = "k3"
    """k1 is the log-ratio: as a penalty its mean gradient is 0, so it only reports. k2 is half its square. k3 is
    unbiased and non-negative."""


class NoCorrection(Config):
    """Every token counts the same, whichever weights made it. The default with pipeline.max_staleness 0."""

    type: Literal["none"] = "none"


class TruncatedCorrection(Config):
    """Truncated importance sampling: the policy loss of a token is multiplied by how much likelier the weights at the
    start of the step make it than those that sampled it did, up to a limit. The default with a larger one."""

    type: Literal["truncated"] = "truncated"
    limit: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """The largest factor. Lower ones bound the variance more, and leave more of the bias."""


RolloutCorrection = NoCorrection | TruncatedCorrection


class GrpoConfig(Config):
    """Group Relative Policy Optimization."""

    type: Literal["grpo"] = "grpo"
    group_size: Batch = 8
    """Samples of a prompt; at least 2."""
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    advantage_eps: Annotated[float, Field(ge=1e-12, le=1)] = 1e-6
    """Added to that standard deviation."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0, le=1e6)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number."""
    kl: KlConfig = KlConfig()
    rollout_correction: RolloutCorrection | None = Field(default=None, discriminator="type")
    """For responses that other weights sampled than those they train; by default truncated where pipeline.max_staleness
    lets that happen, and none at 0."""

    @field_validator("group_size")
    @classmethod
    def _needs_a_group(cls, group_size: int) -> int:
        if group_size < 2:
            raise ValueError(
                f"is {group_size}: GRPO compares the samples of a group, "
                f"and a lone sample's advantage is 0; use 2 or more"
            )
        return group_size


class AdapterAlgorithmConfig(Config):
    """Your own algorithm, see docs/algorithms.md. `f(group_size=…, **options)` makes it."""

    type: Literal["adapter"] = "adapter"
    path: str
    """Dotted path of `f`, such as my_package.my_algorithm.MyAlgorithm; the working directory is importable."""
    group_size: Batch = 8
    """Samples of a prompt."""
    options: Keywords = {}
    """Passed on as keywords."""


AlgorithmConfig = Annotated[GrpoConfig | AdapterAlgorithmConfig, Field(discriminator="type")]
