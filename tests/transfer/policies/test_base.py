"""Behaviour that all policies have in common."""

from collections.abc import Callable
from functools import partial

import pytest

from tailrace.errors import QueueError
from tailrace.planning.balance import partition
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.base import CellFacts, Policy, RowMeta
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.oldest_version import OldestVersionFirst
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tests.transfer.policies.rows import fill, rows_of


@pytest.mark.parametrize(
    "make",
    [
        FirstIn,
        OldestVersionFirst,
        WholeGroups,
        lambda tokens: TokenBudget(tokens, window=1),
        lambda ranks: BalancedByLength(ranks, 4, partition=partial(partition, equal_count=False)),
    ],
)
def test_bounds_below_one_are_refused(make: Callable[[int], Policy]) -> None:
    with pytest.raises(QueueError, match="is 0; it must be at least 1"):
        make(0)


@pytest.mark.parametrize("policy", [WholeGroups(2), TokenBudget(8, window=1), TokenBudget(8, window=None)])
def test_a_group_bigger_than_the_limit_is_an_error_that_removes_nothing(policy: Policy) -> None:
    fill(policy, rows_of(1, 9, 9, 9))
    with pytest.raises(QueueError, match="group 1 has 3 rows, but the claim's limit is 2"):
        policy.take(2)
    assert len(policy.take(3)) == 3


@pytest.mark.parametrize("policy", [FirstIn(1), OldestVersionFirst(1), WholeGroups(1), TokenBudget(1, window=1)])
def test_a_rank_is_refused_where_nothing_is_split_and_nothing_is_removed(policy: Policy) -> None:
    fill(policy, rows_of(1, 9))
    with pytest.raises(QueueError, match=f"names rank 0, but policy '{policy.name}' splits nothing"):
        policy.take(None, 0)
    assert len(policy.take(None)) == 1


def test_a_row_knows_what_was_written_last_and_before() -> None:
    row = RowMeta(id=RowId(0, 0), group_id=0, order=0, lengths={})
    row.learn(CellFacts(lengths={"weight_versions": 5}, version=3))
    row.learn(CellFacts(lengths={"reward": 1}))
    assert (row.lengths, row.version) == ({"weight_versions": 5, "reward": 1}, 3)
