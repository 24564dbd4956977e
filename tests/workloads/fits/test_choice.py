"""The distribution is chosen that samples were drawn from, or one that has their quantiles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TraceError
from tailrace.workloads.fits.choice import check_family, choose
from tailrace.workloads.marginals.base import FitError
from tailrace.workloads.marginals.gamma import Gamma
from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.mixture import Mixture
from tailrace.workloads.marginals.pareto_tail import ParetoTail
from tailrace.workloads.marginals.quantiles import Quantiles

RANDOM = np.random.default_rng(0)
SHARES = np.array([0.5, 0.9, 0.99])


def test_the_family_is_chosen_that_values_were_drawn_from() -> None:
    assert isinstance(choose(np.rint(RANDOM.lognormal(6, 0.7, 2000))), Lognormal)
    assert isinstance(choose(1 + np.rint(RANDOM.gamma(2.0, 300, 2000))), Gamma)
    two = np.concatenate([RANDOM.lognormal(3, 0.2, 600), RANDOM.lognormal(7, 0.3, 1400)])
    assert isinstance(choose(np.rint(two)), Mixture)
    body = Lognormal(log_mean=6.0, log_deviation=0.3)
    tailed = ParetoTail(body=body, threshold=600.0, share=0.1, exponent=1.2)
    assert isinstance(choose(np.rint(tailed.quantile(RANDOM.random(3000)))), ParetoTail)


def test_seconds_of_which_some_are_whole_keep_their_formula() -> None:
    assert isinstance(choose(np.round(np.random.default_rng(1).lognormal(0, 1, 2000), 2)), Lognormal)


def test_quantiles_are_taken_where_no_formula_fits() -> None:
    sizes = RANDOM.choice([583.0, 1063.0, 3830.0, 4245.0], 2000)
    assert isinstance(choose(sizes), Quantiles)
    assert isinstance(choose(RANDOM.lognormal(6, 0.7, 99)), Quantiles)  # too few
    assert isinstance(choose(np.append(RANDOM.lognormal(6, 0.7, 200), 0.0)), Quantiles)  # no logarithm
    assert isinstance(choose(np.full(200, 7.0)), Quantiles)


def test_values_that_are_worth_two_are_fitted() -> None:
    values = np.concatenate([RANDOM.lognormal(5, 0.01, 100), RANDOM.lognormal(7, 0.01, 100)])  # two prompts
    assert not isinstance(choose(values, worth=2.0), Quantiles)  # chance explains all


def test_a_family_that_is_named_is_taken() -> None:
    values = np.rint(RANDOM.gamma(2.0, 300, 2000)) + 1
    assert isinstance(choose(values, "lognormal"), Lognormal | ParetoTail)
    assert isinstance(choose(values, "quantiles"), Quantiles)
    with pytest.raises(
        TraceError, match=r"family 'lognormals' is none of auto, lognormal, .*; did you mean 'lognormal'"
    ):
        check_family("lognormals")


def test_a_family_that_does_not_converge_is_an_error_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.workloads.marginals.mixture._ROUNDS", 1)
    values = RANDOM.lognormal(6, 0.7, 200)
    with pytest.raises(FitError, match="the mixture of 2 components does not converge in 1 rounds"):
        choose(values, "mixture")
    assert isinstance(choose(values), Lognormal)


@settings(max_examples=8)
@given(
    center=st.floats(3.0, 9.0),
    width=st.floats(0.1, 1.2),
    second=st.floats(0.0, 2.0),
    share=st.floats(0.0, 0.5),
    seed=st.integers(0, 99),
)
def test_what_is_chosen_has_the_quantiles_of_the_values(
    center: float, width: float, second: float, share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    shifts = np.where(random.random(800) < share, second, 0.0)
    values = np.maximum(1, np.rint(np.exp(random.normal(center, width, 800) + shifts)))
    true = np.quantile(values, SHARES)
    assert choose(values).quantile(SHARES) == pytest.approx(true, rel=0.25)
