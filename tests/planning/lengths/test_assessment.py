"""Expectations are compared with lengths as one would by hand."""

import math
import random

import numpy as np
import pytest

from tailrace.planning.lengths.assessment import assess
from tailrace.planning.lengths.base import Expectation
from tests.planning.lengths.test_effects import drawn


def expectations(*tokens: float, wide: float = 2.0) -> list[Expectation]:
    return [Expectation(each, each / wide, each * wide) for each in tokens]


def test_ten_responses_of_five_groups() -> None:
    lengths = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    found = assess(expectations(10, 20, 30, 40, 50, 60, 70, 120, 90, 100), lengths, np.repeat(np.arange(5), 2))
    assert found.responses == 10
    assert found.recall == {20: 0.5, 10: 0.0, 5: None}
    assert found.ceiling == {20: 1.0, 10: 0.0, 5: None}, "the longest one's sibling is the second longest"
    assert found.tau == pytest.approx((45 - 2 * 2) / 45)
    assert found.inside == 1.0
    assert found.of_ceiling == 0.5


def test_the_interval_counts_what_is_within_it() -> None:
    assert assess(expectations(10, 10, 10, 10), [5, 20, 4, 21], [0, 0, 1, 1]).inside == 0.5


def test_expectations_that_are_all_equal_have_no_order() -> None:
    found = assess(expectations(*[7] * 10), range(10), range(10))
    assert found.tau is None
    assert found.recall[20] == pytest.approx(0.2), "chance alone"
    assert found.ceiling[20] is None, "no group has another response"
    assert found.of_ceiling is None


def test_what_lengths_are_drawn_with_reaches_the_ceiling() -> None:
    chance = random.Random(0)
    responses = drawn(chance, 300, 8, between=0.8, within=0.4)
    tokens = [response.tokens for response in responses]
    groups = [int(response.asked.prompt_id) for response in responses]
    sums: dict[int, list[float]] = {}
    for group, length in zip(groups, tokens, strict=True):
        sums.setdefault(group, []).append(math.log(length))
    typical = [Expectation.of(float(np.mean(sums[group])), 0.4) for group in groups]
    found = assess(typical, tokens, groups)
    assert found.of_ceiling is not None
    assert found.of_ceiling > 0.95
    assert found.inside == pytest.approx(0.8, abs=0.05)
