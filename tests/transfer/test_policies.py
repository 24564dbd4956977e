"""Policies beside what the machines of the planes hold: micro-batches, bad arguments, order of arrival."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies import FirstIn, Policy, RowMeta, TokenBudget, WholeGroups


def rows_of(group_id: int, *lengths: int, prompt: int = 2, order: int | None = None) -> list[RowMeta]:
    """A group with responses of these lengths."""
    start = group_id * 100 if order is None else order
    return [
        RowMeta(
            id=RowId(group_id * 100 + i, 0),
            group_id=group_id,
            order=start + i,
            lengths={"prompt_ids": prompt, "response_ids": length},
        )
        for i, length in enumerate(lengths)
    ]


def groups_of(rows: list[RowMeta]) -> list[int]:
    return list(dict.fromkeys(row.group_id for row in rows))


def fill(policy: Policy, *groups: list[RowMeta]) -> None:
    for rows in groups:
        policy.added(rows)
    for rows in groups:
        for row in rows:
            policy.ready(row)


def test_first_in_takes_the_smallest_orders() -> None:
    policy = FirstIn(3)
    fill(policy, rows_of(2, 1, 1), rows_of(1, 1, 1))
    assert [row.order for row in policy.take(None)] == [100, 101, 200]
    assert [row.order for row in policy.take(None)] == [201]
    assert policy.take(None) == []


def test_whole_groups_come_in_the_order_in_which_they_became_whole() -> None:
    policy = WholeGroups(2)
    first, second, third = rows_of(1, 1, 1), rows_of(2, 1), rows_of(3, 1)
    for rows in (first, second, third):
        policy.added(rows)
    for row in (first[0], third[0], second[0], first[1]):
        policy.ready(row)
    assert groups_of(policy.take(None)) == [3, 2]
    assert groups_of(policy.take(None)) == [1]


def test_a_group_given_back_returns_to_its_place() -> None:
    policy = WholeGroups(1)
    fill(policy, rows_of(1, 1, 1), rows_of(2, 1))
    for row in policy.take(None):
        policy.ready(row)
    assert groups_of(policy.take(None)) == [1]


def test_the_rest_of_a_half_consumed_group_counts_as_whole() -> None:
    policy = WholeGroups(1)
    rows = rows_of(1, 1, 1)
    fill(policy, rows)
    policy.take(None)
    policy.ready(rows[1])
    assert policy.take(None) == []
    policy.consumed(rows[0])
    assert policy.take(None) == [rows[1]]


def test_a_token_budget_counts_the_prompt_once() -> None:
    policy = TokenBudget(10, in_order=False)
    fill(policy, rows_of(1, 4, 4, prompt=2), rows_of(2, 1, prompt=1))
    assert groups_of(policy.take(None)) == [1]


def test_a_token_budget_waits_until_the_next_group_does_not_fit() -> None:
    policy = TokenBudget(10, in_order=False)
    fill(policy, rows_of(1, 3), rows_of(2, 1))
    assert policy.take(None) == []
    fill(policy, rows_of(3, 1))
    assert groups_of(policy.take(None)) == [1, 2]
    assert policy.take(None) == []
    assert groups_of(policy.take(1)) == [3]


def test_a_budget_used_up_exactly_is_not_waited_on() -> None:
    policy = TokenBudget(10, in_order=False)
    fill(policy, rows_of(1, 8))
    assert groups_of(policy.take(None)) == [1]


def test_in_order_a_group_half_given_back_bars_later_ones_until_it_is_whole() -> None:
    policy = TokenBudget(10, in_order=True)
    first, second = rows_of(1, 10, 10), rows_of(2, 50)
    fill(policy, first, second)
    assert policy.take(2) == first
    policy.ready(first[1])
    assert policy.take(2) == []
    policy.consumed(first[0])
    assert policy.take(2) == [first[1]]
    assert policy.take(2) == second


def test_a_group_over_the_budget_is_handed_out_alone_and_at_once() -> None:
    policy = TokenBudget(10, in_order=True)
    fill(policy, rows_of(1, 30, 30))
    assert groups_of(policy.take(None)) == [1]


def test_in_order_a_slow_group_is_waited_for() -> None:
    slow, quick = rows_of(1, 5), rows_of(2, 50)
    for in_order, expected in ((True, []), (False, [2])):
        policy = TokenBudget(10, in_order=in_order)
        policy.added(slow)
        fill(policy, quick)
        assert groups_of(policy.take(None)) == expected


def test_in_order_an_earlier_group_that_comes_late_is_waited_for() -> None:
    policy = TokenBudget(10, in_order=True)
    fill(policy, rows_of(2, 50))
    late = rows_of(1, 5)
    policy.added(late)
    assert policy.take(None) == []
    policy.ready(late[0])
    assert groups_of(policy.take(None)) == [1]


def test_without_a_budget_exactly_the_limit_is_gathered_in_order() -> None:
    policy = TokenBudget(None, in_order=True)
    fill(policy, rows_of(3, 99, 99), rows_of(1, 99, 99))
    assert policy.take(6) == []
    fill(policy, rows_of(2, 1, 1))
    assert [row.order for row in policy.take(6)] == [100, 101, 200, 201, 300, 301]


def test_without_a_budget_a_limit_is_needed() -> None:
    with pytest.raises(QueueError, match="needs a limit"):
        TokenBudget(None, in_order=True).take(None)


@pytest.mark.parametrize("policy", [WholeGroups(2), TokenBudget(8, in_order=True), TokenBudget(8, in_order=False)])
def test_a_group_bigger_than_the_limit_is_an_error_that_removes_nothing(policy: Policy) -> None:
    fill(policy, rows_of(1, 9, 9, 9))
    with pytest.raises(QueueError, match="group 1 has 3 rows, but the claim's limit is 2"):
        policy.take(2)
    assert len(policy.take(3)) == 3


@pytest.mark.parametrize("make", [FirstIn, WholeGroups, lambda tokens: TokenBudget(tokens, in_order=True)])
def test_bounds_below_one_are_refused(make: Callable[[int], Policy]) -> None:
    with pytest.raises(QueueError, match="is 0; it must be at least 1"):
        make(0)


def next_fit(groups: list[list[RowMeta]], tokens: int) -> list[list[int]]:
    """Micro-batches, as group ids, that packing the whole batch at once gives."""
    batches: list[list[int]] = []
    room = 0
    for rows in groups:
        cost = 2 + sum(row.lengths["response_ids"] for row in rows)
        if cost > room:
            batches.append([])
            room = tokens
        batches[-1].append(rows[0].group_id)
        room -= cost
    return batches


@given(
    lengths=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=12),
    tokens=st.integers(1, 40),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None, derandomize=True)
def test_streamed_in_order_the_claims_are_the_micro_batches_of_the_whole_batch(
    lengths: list[list[int]], tokens: int, random: Random
) -> None:
    policy = TokenBudget(tokens, in_order=True)
    groups = [rows_of(number, *responses) for number, responses in enumerate(lengths)]
    for rows in groups:
        policy.added(rows)
    left = sum(map(len, groups))
    claims = []
    finished = [row for rows in groups for row in rows]
    random.shuffle(finished)
    for row in finished:
        policy.ready(row)
        while left and (claim := policy.take(left)):
            claims.append(groups_of(claim))
            left -= len(claim)
    assert claims == next_fit(groups, tokens)
