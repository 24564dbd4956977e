"""Batches split among ranks: against a scan of all rows, and in cases that the scan does not cover."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tailrace.errors import QueueError
from tailrace.planning.balance import partition
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.base import RowMeta
from tests.transfer.policies.rows import fill, groups_of, orders_of, rows_of

EQUAL = partial(partition, equal_count=True)


def cost(rows: Sequence[RowMeta]) -> int:
    return sum(row.lengths["prompt_ids"] + row.lengths["response_ids"] for row in rows)


def balanced(ranks: int, rows: int) -> BalancedByLength:
    return BalancedByLength(ranks, rows, partition=EQUAL)


@dataclass(eq=False)
class Scanned:
    """The reference's record of a row."""

    row: RowMeta
    ready: bool = False
    place: tuple[int, int] | None = None
    """The row's batch and rank."""


class BalancedMachine(RuleBasedStateMachine):
    """Whatever rows come, go back or are acked, a claim is the one that a scan of all rows gives."""

    @initialize(ranks=st.integers(1, 3), rows=st.integers(4, 7))
    def start(self, ranks: int, rows: int) -> None:
        self.policy, self.ranks, self.rows = balanced(ranks, rows), ranks, rows
        self.stored: dict[RowId, Scanned] = {}
        self.arrived: list[int] = []
        self.leased: list[RowMeta] = []
        self.consumed: Counter[RowId] = Counter()
        self.groups = self.batches = 0

    @rule(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4), at_once=st.booleans())
    def add(self, lengths: list[int], at_once: bool) -> None:
        rows = rows_of(self.groups, *lengths)
        self.groups += 1
        self.policy.added(rows)
        self.stored.update((row.id, Scanned(row)) for row in rows)
        for row in rows if at_once else rows[1:]:
            self.make_ready(row)

    @precondition(lambda self: any(not kept.ready and kept.place is None for kept in self.stored.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        waiting = [kept.row for kept in self.stored.values() if not kept.ready and kept.place is None]
        self.make_ready(data.draw(st.sampled_from(waiting)))

    def make_ready(self, row: RowMeta) -> None:
        self.policy.ready(row)
        self.stored[row.id].ready = True
        if all(kept.ready and kept.place is None for kept in self.group(row.group_id)):
            self.arrived.append(row.group_id)

    def group(self, group_id: int) -> list[Scanned]:
        return [kept for kept in self.stored.values() if kept.row.group_id == group_id]

    @rule(rank=st.integers(0, 2), limit=st.none() | st.integers(1, 4))
    def claim(self, rank: int, limit: int | None) -> None:
        if rank < self.ranks:
            self.expect_claim(rank, limit)
        else:
            with pytest.raises(QueueError, match=f"names rank {rank}, but .* among ranks 0 to {self.ranks - 1}"):
                self.policy.take(limit, rank)

    def expect_claim(self, rank: int, limit: int | None) -> bool:
        self.split_if_due()
        mine = [kept for kept in self.stored.values() if kept.ready and kept.place and kept.place[1] == rank]
        oldest = min((kept.place for kept in mine if kept.place), default=None)
        part = sorted((kept.row for kept in mine if kept.place == oldest), key=lambda row: row.order)
        taken = self.policy.take(limit, rank)
        assert taken == part[:limit]
        for row in taken:
            self.stored[row.id].ready = False
        self.leased += taken
        return bool(taken)

    def split_if_due(self) -> None:
        if any(kept.ready and kept.place for kept in self.stored.values()):
            return
        if sum(len(self.group(group_id)) for group_id in self.arrived) < self.rows:
            return
        batch: list[RowMeta] = []
        while self.arrived and len(batch) + len(self.group(self.arrived[0])) <= self.rows:
            batch += [kept.row for kept in self.group(self.arrived.pop(0))]
        for rank, items in enumerate(EQUAL([cost([row]) for row in batch], self.ranks)):
            for item in items:
                self.stored[batch[item].id].place = self.batches, rank
        self.batches += 1

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), ack=st.booleans())
    def end_a_lease(self, data: st.DataObject, ack: bool) -> None:
        row = data.draw(st.sampled_from(self.leased))
        self.leased.remove(row)
        if ack:
            self.policy.consumed(row)
            self.consumed[row.id] += 1
            del self.stored[row.id]
        else:
            self.policy.ready(row)
            self.stored[row.id].ready = True

    def teardown(self) -> None:
        """Assert that all rows but those of a last, incomplete batch are consumed, each once."""
        if not hasattr(self, "policy"):
            return
        for kept in [kept for kept in self.stored.values() if not kept.ready and kept.place is None]:
            self.make_ready(kept.row)
        while any([self.expect_claim(rank, None) for rank in range(self.ranks)]):
            pass
        for row in self.leased:
            self.policy.consumed(row)
            self.consumed[row.id] += 1
            del self.stored[row.id]
        assert len(self.stored) < self.rows
        assert set(self.consumed.values()) <= {1}


TestBalancedEqualsAScan = BalancedMachine.TestCase
TestBalancedEqualsAScan.settings = settings(max_examples=60, stateful_step_count=40)


def test_ranks_get_equally_many_rows_of_nearly_equal_cost() -> None:
    policy = balanced(2, 4)
    fill(policy, rows_of(1, 9, 1), rows_of(2, 5, 5))
    parts = [policy.take(None, rank) for rank in (0, 1)]
    assert [len(part) for part in parts] == [2, 2]
    assert [cost(part) for part in parts] == [14, 14]


def test_a_batch_waits_for_all_of_its_rows_in_whole_groups() -> None:
    policy = balanced(2, 4)
    slow, quick = rows_of(1, 1, 1), rows_of(2, 1, 1)
    policy.added(slow)
    fill(policy, quick)
    policy.ready(slow[0])
    assert policy.take(None, 0) == []
    policy.ready(slow[1])
    assert sorted(orders_of(policy.take(None, 0) + policy.take(None, 1))) == [100, 101, 200, 201]


def test_a_rank_that_is_ahead_waits_until_the_others_have_taken_their_parts() -> None:
    policy = balanced(2, 2)
    fill(policy, *(rows_of(number, 1) for number in range(4)))
    assert groups_of(policy.take(None, 0)) == [0]
    assert policy.take(None, 0) == []
    assert groups_of(policy.take(None, 1)) == [1]
    assert groups_of(policy.take(None, 0)) == [2]


def test_rows_given_back_go_to_the_same_rank_before_and_apart_from_its_next_part() -> None:
    policy = balanced(2, 4)
    fill(policy, rows_of(1, 1, 1, 1, 1), rows_of(2, 1, 1, 1, 1))
    first, other = policy.take(None, 0), policy.take(None, 1)
    assert groups_of(policy.take(1, 0)) == [2]
    policy.ready(first[1])
    policy.ready(other[0])
    assert policy.take(None, 0) == [first[1]]
    assert groups_of(policy.take(None, 0)) == [2]
    assert policy.take(None, 1) == [other[0]]
    assert groups_of(policy.take(None, 1)) == [2]


def test_a_limit_leaves_the_rest_of_a_part_for_the_next_claim() -> None:
    policy = balanced(1, 3)
    fill(policy, rows_of(1, 1, 1, 1))
    assert orders_of(policy.take(2, 0)) == [100, 101]
    assert orders_of(policy.take(2, 0)) == [102]


def test_a_group_that_does_not_fit_is_for_the_next_batch() -> None:
    policy = balanced(1, 4)
    fill(policy, rows_of(1, 1, 1, 1), rows_of(2, 1, 1, 1))
    assert groups_of(policy.take(None, 0)) == [1]
    assert policy.take(None, 0) == []


def test_a_claim_without_a_rank_is_refused() -> None:
    with pytest.raises(QueueError, match=r"names no rank, but policy 'balanced' splits .* ranks 0 to 1; pass"):
        balanced(2, 4).take(None)


def test_more_ranks_than_rows_are_refused() -> None:
    with pytest.raises(QueueError, match="rows is 3; it must be at least the number of ranks, 4"):
        balanced(4, 3)


def test_a_group_bigger_than_a_batch_is_an_error() -> None:
    policy = balanced(1, 2)
    fill(policy, rows_of(7, 1, 1, 1))
    with pytest.raises(QueueError, match=r"group 7 has 3 rows, but balanced\.rows is 2"):
        policy.take(None, 0)


def test_cost_columns_are_columns_of_the_policy() -> None:
    assert balanced(1, 1).columns == ("prompt_ids", "response_ids")
    assert BalancedByLength(1, 1, partition=EQUAL, cost_columns=("prompt_ids",)).columns == ("prompt_ids",)


def test_nothing_is_kept_of_consumed_rows() -> None:
    policy = balanced(1, 2)
    fill(policy, rows_of(1, 1, 1))
    for row in policy.take(None, 0):
        policy.consumed(row)
    fill(policy, rows_of(1, 1))
    assert policy.take(None, 0) == [], "a row of the same id is not of the old batch"
