"""Drifts and changes of regime, on series with known answers."""

import math

import numpy as np
import pytest

from tailrace.workloads.characterization.trend import LEAST_STEPS, TrendFigures


def trend(logs: list[float]) -> TrendFigures:
    found = TrendFigures.of(range(len(logs)), logs)
    assert found is not None
    return found


def test_a_steady_growth_is_the_drift() -> None:
    found = trend([math.log(100 * 1.02**step) for step in range(20)])
    assert (found.drift, found.low, found.high) == pytest.approx((0.02, 0.02, 0.02))
    assert found.is_clear


def test_the_drift_is_by_step_and_not_by_place() -> None:
    found = TrendFigures.of([0, 10, 20, 30, 40], [0.0, 0.1, 0.2, 0.3, 0.4])
    assert found is not None
    assert found.drift == pytest.approx(math.expm1(0.01))


def test_the_interval_holds_the_drift_in_nineteen_of_twenty_series() -> None:
    random = np.random.default_rng(0)
    found = [trend((0.01 * np.arange(30) + random.normal(0, 0.2, 30)).tolist()) for _ in range(400)]
    held = np.mean([each.low <= math.expm1(0.01) <= each.high for each in found])
    assert 0.92 < held < 0.98


def test_noise_has_a_clear_drift_in_one_of_twenty_series() -> None:
    random = np.random.default_rng(1)
    assert 0.02 < np.mean([trend(random.normal(0, 1, 30).tolist()).is_clear for _ in range(400)]) < 0.08


def test_the_drift_of_a_monotone_series_has_the_chance_of_mann_and_kendalls_test() -> None:
    # All 15 pairs grow: S = 15, its variance 6 · 5 · 17 / 18. The deviations from a line alternate: no correlation.
    found = trend([0.0, 1.1, 2.0, 3.1, 4.0, 5.1])
    assert found.p_value == pytest.approx(math.erfc(14 / (6 * 5 * 17 / 18) ** 0.5 / 2**0.5))


def test_steps_that_go_with_those_before_have_a_clear_drift_about_as_rarely() -> None:
    random = np.random.default_rng(5)
    found = []
    for _ in range(300):
        levels = [0.0]
        for moved in random.normal(0, 1, 69):
            levels.append(0.6 * levels[-1] + moved)
        found.append(trend(levels[20:]))
    assert np.mean([each.is_clear for each in found]) < 0.1  # of independent steps 0.05; without regard to it 0.3
    assert np.mean([each.change.p_value < 0.05 for each in found]) < 0.1  # without regard to it 0.4


def test_one_outlier_does_not_sway_the_drift() -> None:
    logs = [0.01 * step for step in range(21)]
    logs[20] += 5
    assert trend(logs).drift == pytest.approx(math.expm1(0.01), rel=0.1)


def test_the_change_of_pettitts_test_is_the_one_worked_out_by_hand() -> None:
    # Ranks 1 to 6: U = 2 · (1 + 2 + 3) - 3 · 7 = -9 after three steps, so p = 2 exp(-6 · 81 / (216 + 36)).
    change = trend([1.0, 2.0, 3.0, 10.0, 11.0, 12.0]).change
    assert change.step == 3
    assert change.p_value == pytest.approx(2 * math.exp(-486 / 252))
    assert (change.before, change.after) == pytest.approx((math.exp(2), math.exp(11)))


def test_a_sudden_drop_is_found_at_its_step() -> None:
    random = np.random.default_rng(2)
    logs = np.concatenate([random.normal(8, 0.1, 30), random.normal(7.5, 0.3, 29)])  # as PolyTrace's figure 14 (a)
    change = trend(logs.tolist()).change
    assert abs(change.step - 30) <= 3
    assert change.p_value < 1e-6
    assert change.after < change.before


def test_a_change_in_noise_is_rarely_significant() -> None:
    random = np.random.default_rng(3)
    found = [trend(random.normal(0, 1, 40).tolist()).change.p_value for _ in range(300)]
    assert np.mean(np.array(found) < 0.05) < 0.08


def test_a_constant_series_has_neither_drift_nor_change() -> None:
    found = trend([1.0] * 10)
    assert (found.drift, found.is_clear, found.change.p_value) == (0.0, False, 1.0)


def test_few_steps_have_no_trend() -> None:
    assert TrendFigures.of([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0]) is None


def test_the_fewest_steps_give_an_interval_that_holds_the_drift() -> None:
    random = np.random.default_rng(4)
    found = [trend(random.normal(0, 1, LEAST_STEPS).tolist()) for _ in range(1000)]
    assert np.mean([each.low <= 0 <= each.high for each in found]) > 0.95


def test_many_steps_are_averaged_and_keep_their_drift() -> None:
    found = trend([1e-4 * step for step in range(5000)])
    assert found.drift == pytest.approx(math.expm1(1e-4))
