"""A trend and a regime are found where they are, and not where chance would do the same."""

import numpy as np
import polars as pl
import pytest

from tailrace.workloads.fits.drift import fit_drift
from tailrace.workloads.parameters import Regime, Trend


def samples(levels: list[float], seed: int = 0, first: int = 0) -> pl.DataFrame:
    """200 samples for each step, whose log-lengths have these means."""
    random = np.random.default_rng(seed)
    steps = np.repeat(np.arange(first, first + len(levels)), 200)
    lengths = np.rint(np.exp(random.normal(np.repeat(levels, 200), 0.3)))
    return pl.DataFrame({"step": steps, "response_tokens": lengths})


def test_a_trend_is_the_growth_of_each_step() -> None:
    found = fit_drift(samples([6 + 0.05 * step for step in range(12)], first=3))
    assert isinstance(found, Trend)
    assert found.per_step == pytest.approx(0.05, abs=0.01)
    assert found.steps == 12
    assert [found.factor(step) for step in (0, 2)] == [1.0, pytest.approx(np.exp(2 * found.per_step))]
    assert found.factor(11) == found.factor(500)  # nothing is known of later steps


def test_a_regime_begins_at_the_step_of_the_change() -> None:
    found = fit_drift(samples([6.0] * 7 + [5.5] * 13))
    assert isinstance(found, Regime)
    assert found.step == 7
    assert found.change == pytest.approx(np.exp(-0.5), rel=0.05)
    assert [found.factor(step) for step in (0, 6, 7, 99)] == [1.0, 1.0, found.change, found.change]


def test_chance_is_no_drift() -> None:
    random = np.random.default_rng(1)
    found = [fit_drift(samples(random.normal(6, 0.05, 20).tolist(), seed)) for seed in range(50)]
    assert sum(each is not None for each in found) <= 2


def test_levels_that_wander_are_no_drift() -> None:
    random = np.random.default_rng(2)
    found = []
    for _ in range(100):
        levels = [6.0]
        for moved in random.normal(0, 0.04, 39):
            levels.append(6.0 + 0.6 * (levels[-1] - 6.0) + moved)
        lengths = np.exp(levels)
        found.append(fit_drift(pl.DataFrame({"step": range(40), "response_tokens": lengths})))
    assert sum(each is not None for each in found) <= 8  # without regard to it, 27


def test_few_steps_and_equal_lengths_show_no_drift() -> None:
    assert fit_drift(samples([5.0, 6.0, 7.0, 8.0, 9.0])) is None
    assert fit_drift(pl.DataFrame({"step": range(10), "response_tokens": [7] * 10})) is None


def test_levels_that_never_vary_on_either_side_are_a_regime() -> None:
    found = fit_drift(pl.DataFrame({"step": range(20), "response_tokens": [7] * 10 + [14] * 10}))
    assert isinstance(found, Regime)
    assert found.step == 10
    assert found.change == pytest.approx(2.0)
