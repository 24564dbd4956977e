"""Token budgets, beyond what the state machines check: micro-batches, bad arguments, order of arrival."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import QueueError
from tailrace.transfer.queue.policies.base import RowMeta
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tests.transfer.policies.rows import fill, groups_of, orders_of, rows_of


def test_a_token_budget_counts_the_prompt_once() -> None:
    policy = TokenBudget(10, window=None)
    fill(policy, rows_of(1, 4, 4, prompt=2), rows_of(2, 1, prompt=1))
    assert groups_of(policy.take(None)) == [1]


def test_a_token_budget_waits_until_the_next_group_does_not_fit() -> None:
    policy = TokenBudget(10, window=None)
    fill(policy, rows_of(1, 3), rows_of(2, 1))
    assert policy.take(None) == []
    fill(policy, rows_of(3, 1))
    assert groups_of(policy.take(None)) == [1, 2]
    assert policy.take(None) == []
    assert groups_of(policy.take(1)) == [3]


def test_a_budget_used_up_exactly_is_not_waited_on() -> None:
    policy = TokenBudget(10, window=None)
    fill(policy, rows_of(1, 8))
    assert groups_of(policy.take(None)) == [1]


def test_in_order_a_group_half_given_back_bars_later_ones_until_it_is_whole() -> None:
    policy = TokenBudget(10, window=1)
    first, second = rows_of(1, 10, 10), rows_of(2, 50)
    fill(policy, first, second)
    assert policy.take(2) == first
    policy.ready(first[1])
    assert policy.take(2) == []
    policy.consumed(first[0])
    assert policy.take(2) == [first[1]]
    assert policy.take(2) == second


def test_a_group_over_the_budget_is_handed_out_alone_and_at_once() -> None:
    policy = TokenBudget(10, window=1)
    fill(policy, rows_of(1, 30, 30))
    assert groups_of(policy.take(None)) == [1]


def test_in_order_a_slow_group_is_waited_for() -> None:
    slow, quick = rows_of(1, 5), rows_of(2, 50)
    for window, expected in ((1, []), (None, [2])):
        policy = TokenBudget(10, window=window)
        policy.added(slow)
        fill(policy, quick)
        assert groups_of(policy.take(None)) == expected


def test_in_order_an_earlier_group_that_comes_late_is_waited_for() -> None:
    policy = TokenBudget(10, window=1)
    fill(policy, rows_of(2, 50))
    late = rows_of(1, 5)
    policy.added(late)
    assert policy.take(None) == []
    policy.ready(late[0])
    assert groups_of(policy.take(None)) == [1]


def test_within_a_window_a_slow_group_is_overtaken_and_bars_the_next_window() -> None:
    policy = TokenBudget(10, window=300)
    slow = rows_of(1, 5)
    policy.added(slow)
    fill(policy, rows_of(2, 50), rows_of(4, 50))
    assert groups_of(policy.take(None)) == [2]
    assert policy.take(None) == []
    policy.ready(slow[0])
    assert groups_of(policy.take(1)) == [1]
    assert groups_of(policy.take(None)) == [4]


def test_a_lost_group_bars_later_windows_until_it_was_put_again() -> None:
    policy = TokenBudget(10, window=300)
    lost = rows_of(1, 50)
    fill(policy, lost, rows_of(4, 50))
    policy.take(None)
    policy.lost(lost)
    assert policy.take(None) == []
    fill(policy, rows_of(1, 50))
    assert [groups_of(policy.take(None)) for _ in range(2)] == [[1], [4]]


def test_a_window_has_a_row_at_least() -> None:
    with pytest.raises(QueueError, match="window is 0"):
        TokenBudget(10, window=0)


def test_without_a_budget_exactly_the_limit_is_gathered_in_order() -> None:
    policy = TokenBudget(None, window=1)
    fill(policy, rows_of(3, 99, 99), rows_of(1, 99, 99))
    assert policy.take(6) == []
    fill(policy, rows_of(2, 1, 1))
    assert orders_of(policy.take(6)) == [100, 101, 200, 201, 300, 301]


@pytest.mark.parametrize("is_consumed", [False, True])
def test_what_comes_again_of_a_window_is_claimed_without_rows_of_the_next(is_consumed: bool) -> None:
    policy = TokenBudget(None, window=200)
    lost = rows_of(1, 5)
    fill(policy, rows_of(0, 5), lost)
    taken = policy.take(2)
    for row in taken if is_consumed else taken[:1]:
        policy.consumed(row)
    if not is_consumed:
        policy.lost(lost)
        fill(policy, rows_of(2, 5), rows_of(3, 5))
        assert policy.take(2) == [], "the lost group comes first"
    again = rows_of(1, 5, 5)
    policy.added(again)
    policy.ready(again[0])
    assert policy.take(8) == [], "its second row is not ready"
    policy.ready(again[1])
    assert groups_of(policy.take(8)) == [1]
    if is_consumed:
        fill(policy, rows_of(2, 5), rows_of(3, 5))
    assert groups_of(policy.take(2)) == [2, 3]


def test_a_window_that_has_entered_in_part_is_waited_for() -> None:
    policy = TokenBudget(None, window=200)
    fill(policy, rows_of(0, 5))
    assert policy.take(2) == []
    fill(policy, rows_of(1, 5))
    assert groups_of(policy.take(2)) == [0, 1]


def test_without_a_budget_a_limit_is_needed() -> None:
    with pytest.raises(QueueError, match="needs a limit"):
        TokenBudget(None, window=1).take(None)


def next_fit(groups: list[list[RowMeta]], tokens: int) -> list[list[int]]:
    """The micro-batches, as group ids, that packing the whole batch at once gives."""
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
def test_streamed_in_order_the_claims_are_the_micro_batches_of_the_whole_batch(
    lengths: list[list[int]], tokens: int, random: Random
) -> None:
    policy = TokenBudget(tokens, window=1)
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


def test_at_one_of_several_controllers_a_claim_ends_with_the_rows_of_its_window() -> None:
    policy = TokenBudget(None, window=400, ends_with_window=True)
    fill(policy, rows_of(0, 1), rows_of(2, 1), rows_of(4, 1))
    assert policy.next_window == 0
    assert groups_of(policy.take(8)) == [0, 2]
    assert policy.next_window == 1
    assert groups_of(policy.take(8)) == [4]
    assert policy.next_window is None


def test_at_one_of_several_controllers_a_claim_waits_for_all_rows_of_its_window() -> None:
    policy = TokenBudget(10, window=400, ends_with_window=True)
    first, second = rows_of(0, 1), rows_of(2, 1)
    policy.added(second)
    fill(policy, first, rows_of(4, 20))
    assert policy.take(8) == []
    assert policy.next_window == 0
    policy.lost(second)
    assert policy.take(8) == []
    fill(policy, second)
    assert groups_of(policy.take(8)) == [0, 2]
    assert groups_of(policy.take(8)) == [4]
    policy.ready(first[0])
    assert policy.next_window == 0
    assert policy.take(8) == first
