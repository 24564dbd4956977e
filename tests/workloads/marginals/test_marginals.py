"""Distributions give the quantiles of the samples that they are fitted to, and their two directions agree."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.workloads.marginals.base import FitError
from tailrace.workloads.marginals.factory import AnyMarginal
from tailrace.workloads.marginals.gamma import Gamma
from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.mixture import Mixture
from tailrace.workloads.marginals.pareto_tail import ParetoTail
from tailrace.workloads.marginals.quantiles import Quantiles
from tailrace.workloads.marginals.shares import Shares

LOGNORMAL = Lognormal(log_mean=6.0, log_deviation=0.8)
TAIL = {
    "type": "pareto_tail",
    "body": {"type": "lognormal", "log_mean": 6.0, "log_deviation": 0.2},
    "threshold": 900.0,
    "share": 0.1,
    "exponent": 2.0,
}
CONTINUOUS = [
    LOGNORMAL,
    Gamma(shape=1.5, scale=200.0),
    Mixture(weights=[0.3, 0.7], log_means=[3.0, 7.0], log_deviations=[0.2, 0.5]),
    ParetoTail(body=LOGNORMAL, threshold=2000.0, share=0.05, exponent=1.5),
    Quantiles(shares=[0.0, 0.25, 1.0], values=[1.0, 10.0, 500.0]),
]


@pytest.mark.parametrize("marginal", CONTINUOUS, ids=lambda marginal: type(marginal).__name__)
@given(shares=st.lists(st.floats(0.001, 0.999), min_size=1, max_size=20))
def test_the_share_below_a_quantile_is_its_own(marginal: AnyMarginal, shares: list[float]) -> None:
    array = np.array(shares)
    assert marginal.cdf(marginal.quantile(array)) == pytest.approx(array, abs=1e-4)


@pytest.mark.parametrize("marginal", CONTINUOUS, ids=lambda marginal: type(marginal).__name__)
def test_the_distribution_ascends_from_0_to_1(marginal: AnyMarginal) -> None:
    found = marginal.cdf(np.array([-5.0, 0.0, 1.0, 10.0, 100.0, 1e4, 1e14]))
    assert (np.diff(found) >= 0).all()
    assert (found[0], found[-1]) == (0.0, pytest.approx(1.0))


def test_a_body_ends_at_the_threshold_and_the_tail_falls_as_a_power() -> None:
    tailed = ParetoTail(body=LOGNORMAL, threshold=2000.0, share=0.05, exponent=1.5)
    assert tailed.quantile(np.array([0.95])) == pytest.approx([2000.0])
    above = 1 - tailed.cdf(np.array([2000.0, 4000.0, 8000.0]))
    assert above == pytest.approx([0.05, 0.05 / 2**1.5, 0.05 / 4**1.5])


def test_fits_find_the_parameters_that_samples_were_drawn_with() -> None:
    random = np.random.default_rng(0)
    found = Lognormal.fit(random.lognormal(6.0, 0.8, 20_000))
    assert [found.log_mean, found.log_deviation] == pytest.approx([6.0, 0.8], abs=0.02)
    gamma = Gamma.fit(random.gamma(1.5, 200.0, 20_000))
    assert [gamma.shape, gamma.scale] == pytest.approx([1.5, 200.0], rel=0.05)
    tailed = ParetoTail.fit(1000 * (1 + random.pareto(1.5, 20_000)), LOGNORMAL, 0.1)
    assert tailed.exponent == pytest.approx(1.5, rel=0.1)
    assert tailed.share == pytest.approx(0.1, abs=1e-3)


def test_a_mixture_finds_its_components() -> None:
    random = np.random.default_rng(0)
    values = np.exp(np.concatenate([random.normal(3.0, 0.2, 1500), random.normal(7.0, 0.5, 3500)]))
    found = Mixture.fit(values, 2)
    assert found.weights == pytest.approx([0.3, 0.7], abs=0.01)
    assert found.log_means == pytest.approx([3.0, 7.0], abs=0.03)
    assert found.log_deviations == pytest.approx([0.2, 0.5], abs=0.03)


def test_a_lognormal_has_the_moments_that_it_was_made_of() -> None:
    drawn = Lognormal.of_moments(9329.0, 8651.5).quantile((np.arange(1_000_000) + 0.5) / 1_000_000)
    assert (drawn.mean(), drawn.std()) == (pytest.approx(9329.0, rel=1e-3), pytest.approx(8651.5, rel=0.01))


def test_a_tail_needs_values_above_its_threshold_and_a_mean() -> None:
    with pytest.raises(FitError, match="no value is above 7"):
        ParetoTail.fit(np.full(10, 7.0), LOGNORMAL, 0.1)
    with pytest.raises(FitError, match=r"has an exponent of 0\.5, with which it has no mean"):
        ParetoTail.fit((1 - (np.arange(10_000) + 0.5) / 10_000) ** -2, LOGNORMAL, 0.1)


def test_whole_numbers_have_their_shares() -> None:
    counts = Shares.fit(np.array([1.0, 1.0, 3.0, 3.0, 3.0]))
    assert counts.shares == [0.4, 0.0, 0.6]
    assert counts.quantile(np.array([0.01, 0.39, 0.41, 0.99])).tolist() == [1.0, 1.0, 3.0, 3.0]
    assert counts.cdf(np.array([0.0, 1.0, 2.5, 3.0, 9.0])) == pytest.approx([0.0, 0.4, 0.4, 1.0, 1.0])


def test_quantiles_of_equal_values_are_that_value() -> None:
    found = Quantiles.fit(np.full(5, 12.0))
    assert set(found.quantile(np.linspace(0, 1, 7))) == {12.0}
    assert found.cdf(np.array([11.9, 12.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "lognormal", "log_mean": 6.0, "log_deviation": 0.0}, "> 0.0"),
        ({"type": "gamma", "shape": math.inf, "scale": 1.0}, "<= "),
        ({"type": "mixture", "weights": [1.0], "log_means": [1.0, 2.0], "log_deviations": [1.0]}, "different lengths"),
        ({"type": "mixture", "weights": [0.5], "log_means": [1.0], "log_deviations": [1.0]}, "add up to 0.5"),
        ({"type": "quantiles", "shares": [0.0, 1.0], "values": [2.0, 1.0]}, "do not ascend"),
        ({"type": "quantiles", "shares": [0.1, 1.0], "values": [1.0, 2.0]}, "from 0 to 1"),
        ({"type": "quantiles", "shares": [0.0, 1.0], "values": [1.0]}, "1 `values` for 2"),
        ({"type": "shares", "shares": [0.5, 0.4]}, "add up to 0.9"),
        ({"type": "quantiles", "shares": [0.0, 1.0], "values": [-1.0, 1.0]}, ">= 0.0"),
        (TAIL | {"share": 1.0}, "< 1.0"),
        (TAIL | {"threshold": 1e-9}, "nothing below the threshold of 1e-09"),
        ({"type": "weibull"}, "weibull"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(fields, AnyMarginal)
