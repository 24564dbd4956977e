"""Whole groups in the order in which they became whole."""

from tailrace.transfer.queue.policies.groups import WholeGroups
from tests.transfer.policies.rows import fill, groups_of, rows_of


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
