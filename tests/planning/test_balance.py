"""Splits of equal cost: complete, within their proven bounds, and better than LPT where that is known."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.planning.balance import partition

Split = Callable[[Sequence[float], int], list[list[int]]]
SPLITS: list[Split] = [partial(partition, equal_count=False), partial(partition, equal_count=True)]

COSTS = st.lists(st.integers(0, 10_000), max_size=60)
FEW_COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=6)
RATIOS = {1: 1, 2: 1, 3: 4 / 3, 4: 19 / 12, 5: 103 / 60, 6: 643 / 360}
"""The proven bound on the heaviest part, relative to the best split into equal counts, by items in the largest part."""


def sums(costs: Sequence[float], parts: Sequence[Sequence[int]]) -> list[float]:
    return [sum(costs[item] for item in items) for items in parts]


def lpt(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Longest processing time first (Graham 1969), the simple split: the costliest item goes to the lightest part."""
    result: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        min(result, key=lambda items: sum(costs[i] for i in items)).append(item)
    return sorted(result, key=lambda items: -sum(costs[i] for i in items))


def best(costs: Sequence[float], parts: int, *, equal_count: bool = False) -> float:
    """The weight of the heaviest part in the best of all splits."""
    heaviest = float("inf")
    for homes in product(range(parts), repeat=len(costs)):
        split = [[item for item, home in enumerate(homes) if home == part] for part in range(parts)]
        counts = [len(items) for items in split]
        if not equal_count or max(counts) - min(counts) <= 1:
            heaviest = min(heaviest, max(sums(costs, split)))
    return heaviest


@pytest.mark.parametrize("split", SPLITS)
@given(costs=COSTS, parts=st.integers(1, 9))
def test_every_item_is_in_one_part_and_the_heaviest_part_comes_first(
    split: Split, costs: list[int], parts: int
) -> None:
    result = split(costs, parts)
    assert len(result) == parts
    assert sorted(item for items in result for item in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in result)
    assert sums(costs, result) == sorted(sums(costs, result), reverse=True)
    assert split(costs, parts) == result


@given(costs=COSTS, parts=st.integers(1, 9))
def test_numbers_of_items_differ_by_one_at_most_where_they_are_to_be_equal(costs: list[int], parts: int) -> None:
    counts = [len(items) for items in partition(costs, parts, equal_count=True)]
    assert max(counts) - min(counts) <= (1 if len(costs) % parts else 0)


@given(costs=COSTS, parts=st.integers(1, 9), equal_count=st.booleans())
def test_parts_differ_by_the_dearest_item_at_most(costs: list[int], parts: int, equal_count: bool) -> None:
    weights = sums(costs, partition(costs, parts, equal_count=equal_count))
    assert max(weights) - min(weights) <= max(costs, default=0)


@given(costs=COSTS, parts=st.integers(1, 9))
def test_differencing_is_never_worse_than_lpt_by_more_than_its_bound(costs: list[int], parts: int) -> None:
    ours = max(sums(costs, partition(costs, parts, equal_count=False)))
    theirs = max(sums(costs, lpt(costs, parts)))
    assert ours <= (4 / 3 - 1 / (3 * parts)) * theirs + 1e-9


@given(costs=FEW_COSTS, parts=st.integers(1, 3))
@settings(max_examples=50)
def test_the_heaviest_part_is_within_the_bound_of_the_best_split(costs: list[int], parts: int) -> None:
    heaviest = max(sums(costs, partition(costs, parts, equal_count=False)))
    assert heaviest <= (4 / 3 - 1 / (3 * parts)) * best(costs, parts) + 1e-9


@given(costs=FEW_COSTS, parts=st.integers(1, 3))
@settings(max_examples=50)
def test_parts_of_equal_number_are_within_their_bound_of_the_best_such_split(costs: list[int], parts: int) -> None:
    bound = min(2 - 1 / parts, RATIOS[-(-len(costs) // parts)])
    heaviest = max(sums(costs, partition(costs, parts, equal_count=True)))
    assert heaviest <= bound * best(costs, parts, equal_count=True) + 1e-9


def test_differencing_comes_nearer_to_even_than_lpt_in_the_textbook_case() -> None:
    costs = [8, 7, 6, 5, 4]
    assert sums(costs, partition(costs, 2, equal_count=False)) == [16, 14]
    assert sums(costs, lpt(costs, 2)) == [17, 13]


def test_one_long_response_is_balanced_by_many_short_ones_unless_numbers_are_to_be_equal() -> None:
    costs = [100, *[20] * 5]
    assert sums(costs, partition(costs, 2, equal_count=False)) == [100, 100]
    assert sums(costs, partition(costs, 2, equal_count=True)) == [140, 60]


@pytest.mark.parametrize("split", SPLITS)
def test_fewer_items_than_parts_leave_some_empty(split: Split) -> None:
    assert split([3, 7], 3) == [[1], [0], []]
    assert split([], 2) == [[], []]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("costs", "parts", "message"),
    [
        ([1], 0, "parts is 0; items are split into at least 1"),
        ([1, -2], 2, r"costs\[1\] is -2; give a finite cost of 0 or more"),
        ([float("nan")], 2, r"costs\[0\] is nan"),
        ([1, 2, float("inf")], 2, r"costs\[2\] is inf"),
    ],
)
def test_what_cannot_be_split_is_refused(split: Split, costs: list[float], parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(costs, parts)
