"""Confidence intervals agree with known values, and cover the truth about as often as they claim."""

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.statistics.intervals import fraction_interval, mean_interval


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)  # the last one is from Newcombe 1998, table I
def test_one_answer_to_each_prompt_is_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    scores = [1.0] * right + [0.0] * (count - right)
    assert fraction_interval(scores, count) == pytest.approx((low, high), abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=40))
def test_an_interval_holds_the_mean_and_stays_between_0_and_1(answers: list[tuple[int, int]]) -> None:
    scores = [min(right, count) / count for right, count in answers]
    low, high = fraction_interval(scores, sum(count for _, count in answers))
    assert 0 <= low <= fmean(scores) + 1e-12
    assert fmean(scores) - 1e-12 <= high <= 1


def test_more_answers_to_a_prompt_narrow_it_less_than_more_prompts() -> None:
    def width(scores: list[float], answers: int) -> float:
        low, high = fraction_interval(scores, answers)
        return high - low

    one_each = width([1.0, 0.0] * 10, 20)
    alike = width([1.0, 0.0] * 10, 80)  # four equal answers to each prompt add no information
    apart = width([0.5, 0.25, 0.75, 0.5] * 5, 80)
    more_prompts = width([1.0, 0.0] * 40, 80)
    assert alike == pytest.approx(one_each)
    assert apart < one_each
    assert apart >= more_prompts


@pytest.mark.parametrize("answers", [1, 8])
def test_intervals_cover_the_truth_about_as_often_as_they_say(answers: int) -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        chances = random.beta(1, 2, size=40)  # prompts differ; their mean is 1/3
        scores = random.binomial(answers, chances) / answers
        low, high = fraction_interval(scores.tolist(), 40 * answers)
        covered += low <= 1 / 3 <= high
    assert 0.92 <= covered / 400 <= 0.985


def test_the_interval_of_a_reward_is_of_its_prompts() -> None:
    assert mean_interval([0.0, 1.0, 2.0, 3.0]) == pytest.approx((1.5 - 1.96 * 0.6455, 1.5 + 1.96 * 0.6455), abs=1e-3)
    assert mean_interval([1.0]) is None
