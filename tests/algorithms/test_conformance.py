"""Every algorithm keeps the contract of losses, with every aggregation, correction and rejection."""

from itertools import product
from typing import get_args

import pytest

from tailrace.algorithms.factory import make_algorithm
from tailrace.config.algorithm import (
    CispoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    KlBound,
    KlConfig,
    LossAggMode,
    MaskedCorrection,
    MaxRlConfig,
    PolicyGradientConfig,
    RatioBounds,
    RatioLevel,
    ReinforcePlusPlusConfig,
    RlooConfig,
    TruncatedCorrection,
)
from tailrace.conformance.loss import PolicyLossContract
from tailrace.conformance.loss_cases import ClosedForm, SurrogateName

ALGORITHMS: tuple[type[PolicyGradientConfig], ...] = (
    GrpoConfig,
    DrGrpoConfig,
    RlooConfig,
    ReinforcePlusPlusConfig,
    GspoConfig,
    CispoConfig,
    MaxRlConfig,
)
LEVELS: tuple[RatioLevel, ...] = ("token", "geometric", "sequence")
SURROGATES: dict[type[PolicyGradientConfig], SurrogateName] = {
    GspoConfig: "sequence_clipped",
    CispoConfig: "weight_clipped",
}
"""Of the algorithms without PPO's."""
CORRECTIONS = [correction(level=level) for correction in (TruncatedCorrection, MaskedCorrection) for level in LEVELS]
REJECTIONS = [rejection(level=level) for rejection in (RatioBounds, KlBound) for level in LEVELS]


class Configured(PolicyLossContract):
    """The contract of an algorithm of the package. Each test runs with every `config`."""

    @pytest.fixture(autouse=True)
    def configure(self, config: PolicyGradientConfig) -> None:
        self.algorithm = make_algorithm(config)  # type: ignore[arg-type]
        self.closed_form = ClosedForm(
            mode=config.loss_agg_mode,
            norm_tokens=config.loss_norm_tokens,
            surrogate=SURROGATES.get(type(config), "clipped"),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )


@pytest.mark.parametrize(
    "config",
    [of(loss_agg_mode=mode, loss_norm_tokens=7) for of, mode in product(ALGORITHMS, get_args(LossAggMode))],
    ids=lambda config: f"{config.type}-{config.loss_agg_mode}",
)
class TestAlgorithms(Configured):
    """Every algorithm, in every way to aggregate."""


@pytest.mark.parametrize("config", [of(clip_low=0.2, clip_high=0.28) for of in (GrpoConfig, GspoConfig, CispoConfig)])
class TestClipHigher(Configured):
    """Separate bounds of the ratio."""


@pytest.mark.parametrize("config", [GrpoConfig(kl=KlConfig(coefficient=0.1, estimator=of)) for of in ("k2", "k3")])
class TestPenalty(Configured):
    """A penalty in the loss, which is 0 where policy and reference agree."""


@pytest.mark.parametrize(
    "config",
    [
        *(GrpoConfig(rollout_correction=correction) for correction in CORRECTIONS),
        *(GspoConfig(rollout_rejection=rejection) for rejection in REJECTIONS),
        GrpoConfig(rollout_correction=CORRECTIONS[2], rollout_rejection=REJECTIONS[0]),
    ],
)
class TestCorrections(Configured):
    """Off-policy corrections, which change nothing where engine and trainer agree."""
