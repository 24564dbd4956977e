"""The coefficient of an adaptive KL penalty follows the divergence, whatever is interrupted."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.algorithm import AdaptiveKl, KlConfig
from tailrace.planning.kl_control import KlCoefficients, next_coefficient

CONFIG = AdaptiveKl(target=0.02, gain=0.5)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (0.02, 1.0),  # at the target
        (0.021, 1.025),  # 5 % above it
        (0.019, 0.975),
        (5.0, 1.1),  # an error is at most a fifth
        (0.0, 0.9),
        (-1.0, 0.9),  # k1 may be negative
        (math.nan, 1.0),
        (math.inf, 1.0),
    ],
)
def test_the_coefficient_grows_above_the_target_and_shrinks_below(divergence: float, expected: float) -> None:
    assert next_coefficient(1.0, divergence, CONFIG) == pytest.approx(expected)


def test_the_coefficient_has_a_bound() -> None:
    assert next_coefficient(999.0, 1.0, CONFIG) == 1000.0


KL = KlConfig(coefficient=0.1, adaptive=CONFIG)
DIVERGENCES = st.lists(st.floats(0, 0.1), max_size=12)


@given(DIVERGENCES, st.integers(0, 3))
def test_a_step_has_the_coefficient_of_the_oldest_weights_that_may_begin_it(
    divergences: list[float], max_staleness: int
) -> None:
    coefficients = KlCoefficients(KL, max_staleness)
    after = [0.1]
    for divergence in divergences:
        coefficients.step_ended(divergence)
        after.append(next_coefficient(after[-1], divergence, CONFIG))
    steps = len(divergences)
    found = [coefficients.of_step(step) for step in range(steps + max_staleness + 1)]
    assert found == [after[max(0, step - max_staleness)] for step in range(steps + max_staleness + 1)]
    assert coefficients.of_step(steps + max_staleness + 1) is None


@given(DIVERGENCES, DIVERGENCES, st.integers(0, 3))
def test_what_a_checkpoint_keeps_is_enough_for_all_steps_to_come(
    before: list[float], after: list[float], max_staleness: int
) -> None:
    whole, resumed = KlCoefficients(KL, max_staleness), KlCoefficients(KL, max_staleness)
    for divergence in before:
        whole.step_ended(divergence)
    resumed.restore(len(before), whole.saved())
    for divergence in after:
        whole.step_ended(divergence)
        resumed.step_ended(divergence)
    steps = range(len(before), len(before) + len(after) + max_staleness + 2)
    assert [resumed.of_step(step) for step in steps] == [whole.of_step(step) for step in steps]


def test_a_checkpoint_without_coefficients_begins_with_the_first() -> None:
    resumed = KlCoefficients(KL, 1)
    resumed.restore(7, [])
    assert [resumed.of_step(step) for step in (6, 7, 8, 9)] == [0.1, 0.1, 0.1, None]
