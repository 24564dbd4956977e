"""Every algorithm keeps the contract of losses, with every aggregation, correction and rejection."""

from itertools import product
from typing import get_args

import pytest

from tailrace.algorithms.dapo import KEPT
from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.value_loss import value_loss
from tailrace.config.algorithm import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    KlBound,
    KlConfig,
    LossAggMode,
    MaskedCorrection,
    MaxRlConfig,
    OverlongConfig,
    PolicyGradientConfig,
    PpoConfig,
    RatioBounds,
    RatioLevel,
    ReinforcePlusPlusConfig,
    RlooConfig,
    TruncatedCorrection,
)
from tailrace.conformance.loss import LossContract, PolicyLossContract
from tailrace.conformance.loss_cases import ClosedForm, Sample, SurrogateName

ALGORITHMS: tuple[type[PolicyGradientConfig], ...] = (
    GrpoConfig,
    DrGrpoConfig,
    RlooConfig,
    ReinforcePlusPlusConfig,
    GspoConfig,
    CispoConfig,
    DapoConfig,
    MaxRlConfig,
    PpoConfig,
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


@pytest.mark.parametrize("config", [DapoConfig(overlong=OverlongConfig(filter=True))])
class TestFilter(Configured):
    """Responses that are not kept count for nothing; here all are kept."""

    def batch(self, seed: int) -> list[Sample]:
        return [{**sample, KEPT: sample["mask"]} for sample in super().batch(seed)]


@pytest.mark.parametrize("clip", [None, 0.2])
class TestCritic(LossContract):
    """The loss of PPO's critic, whose values are in the place of log-probabilities."""

    @pytest.fixture(autouse=True)
    def configure(self, clip: float | None) -> None:
        self.clip = clip

    def columns(self) -> tuple[str, ...]:
        return ("values", "returns")

    def loss(self, inputs: LossInputs) -> LossOutput:
        return value_loss(inputs, clip=self.clip)
