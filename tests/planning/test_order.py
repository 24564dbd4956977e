"""Priorities of requests."""

import heapq
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.order import first_in, longest_first


def started(priorities: list[float]) -> list[int]:
    """The requests in the order in which an engine starts them: by priority, then arrival."""
    return sorted(range(len(priorities)), key=lambda number: (-priorities[number], number))


def makespan(lengths: list[int], order: list[int], places: int) -> int:
    """The number of steps until all requests are done. A free place takes the next request."""
    ends = [0] * places
    for number in order:
        heapq.heappush(ends, heapq.heappop(ends) + lengths[number])
    return max(ends)


def test_first_in_keeps_the_order_of_arrival() -> None:
    assert started(first_in(4)) == [0, 1, 2, 3]


def test_the_longest_starts_first_and_equal_ones_as_they_came() -> None:
    assert started(longest_first([3, 9, 3, 12.5])) == [3, 1, 0, 2]


def test_a_long_request_that_came_last_no_longer_prolongs_the_end() -> None:
    lengths = [10] * 6 + [60]
    assert makespan(lengths, started(first_in(7)), 2) == 90
    assert makespan(lengths, started(longest_first(lengths)), 2) == 60


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_longest_first_is_at_most_a_third_worse_than_the_best_order(lengths: list[int], places: int) -> None:
    best = min(
        max(sum(n for n, place in zip(lengths, assigned, strict=True) if place == p) for p in range(places))
        for assigned in itertools.product(range(places), repeat=len(lengths))
    )
    assert 3 * makespan(lengths, started(longest_first(lengths)), places) <= 4 * best


@pytest.mark.parametrize("tokens", [math.nan, math.inf])
def test_an_expectation_that_has_no_place_in_an_order_is_refused(tokens: float) -> None:
    with pytest.raises(ValueError, match=r"expected_tokens\[1\] is (nan|inf); give a finite number"):
        longest_first([5, tokens])
