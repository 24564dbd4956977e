"""A random user of a queue that compares every answer with the reference of `model.py`.

It checks four things. Every claim is exactly the one that a scan of all rows gives: no row is lost, is handed out twice
while leased, or is claimed without its group. Rows that were acked, nacked, expired or retired before are refused.
Bytes are exact. In the end every task has consumed every row once, and the queue is empty.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.errors import GroupExists, LeaseError, QueueError, StaleRowError
from tailrace.transfer.queue.base import NewRow, RowId, TaskStats
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.state import TaskState
from tailrace.transfer.queue.rows.table import QueueTask
from tests.transfer.model import SPECS, LimitTooSmall, Model
from tests.transfer.tables import group, table

LEASE_S = 100.0
"""The length of leases: so long that the seconds of the test itself end none."""
TASKS = st.sampled_from(sorted(SPECS))
LIMITS = st.none() | st.integers(1, 9)


class Driver(Protocol):
    """The queue under test."""

    def put(self, rows: Sequence[NewRow]) -> list[RowId]: ...
    def claim(self, task: str, limit: int | None) -> tuple[Any, list[RowId]] | None:
        """The queue's name for the claim, and its rows; None if the claim would have to wait."""

    def ack(self, claim: Any, sizes: Mapping[RowId, Mapping[str, int]]) -> None: ...
    def nack(self, claim: Any, rows: Sequence[RowId] | None) -> None: ...
    def renew(self, claim: Any) -> None: ...
    def advance(self, seconds: float) -> None: ...
    def restart(self, tasks: Sequence[QueueTask]) -> None:
        """Go on in a new queue, restored from a snapshot of this one."""

    def stats(self) -> tuple[int, int | None, Mapping[str, TaskStats]]:
        """The rows, the bytes (None: not counted) and the tasks."""

    def close(self) -> None: ...


@dataclass(eq=False)
class Held:
    """A claim, its rows, and those of them that are still leased."""

    claim: Any
    task: str
    rows: list[RowId]
    live: list[RowId]
    deadline: float


class QueueMachine(RuleBasedStateMachine):
    """A state machine of a queue's user. Subclasses make the driver."""

    driver: Driver

    def make_driver(self, tasks: Sequence[QueueTask]) -> Driver:
        """A new queue of `tasks` whose leases last LEASE_S."""
        raise NotImplementedError

    @initialize(
        first_in=st.integers(1, 5),
        groups=st.integers(1, 3),
        budget=st.none() | st.integers(1, 40),
        window=st.none() | st.sampled_from([1, 30, 200]),
    )
    def start(self, first_in: int, groups: int, budget: int | None, window: int | None) -> None:
        self.model = Model(first_in=first_in, groups=groups, budget=budget, window=window)
        self.driver = self.make_driver(self.tasks())
        self.now = 0.0
        self.groups_put = 0
        self.places: set[int] = set()
        self.issued: set[RowId] = set()
        self.held: list[Held] = []
        self.consumed: Counter[tuple[str, RowId]] = Counter()
        self.expired: Counter[str] = Counter()

    def tasks(self) -> tuple[QueueTask, ...]:
        model = self.model
        return table(FirstIn(model.first_in), WholeGroups(model.groups), TokenBudget(model.budget, window=model.window))

    @rule(size=st.integers(1, 4), place=st.integers(0, 500), prompt=st.integers(1, 5))
    def put(self, size: int, place: int, prompt: int) -> None:
        while place in self.places:
            place += 1
        self.places.add(place)
        rows = group(self.groups_put, size, order=place * 10, prompt=prompt)
        ids = self.driver.put(rows)
        assert self.issued.isdisjoint(ids), "an id came again"
        self.issued.update(ids)
        self.groups_put += 1
        self.model.put(ids, rows, prompt)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def put_a_group_that_is_there(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.model.rows.values())))
        with pytest.raises(GroupExists):
            self.driver.put(group(row.group_id))

    @rule(task=TASKS, limit=LIMITS)
    def claim(self, task: str, limit: int | None) -> None:
        self.expect_claim(task, limit)

    @rule(task=st.sampled_from(["rollout", "rollout", "reward"]))
    def work(self, task: str) -> None:
        """Move some rows on to the later tasks, where groups and budgets matter."""
        for _ in range(4):
            held = self.expect_claim(task, None)
            if held is not None:
                self.do_ack(held, list(held.live), 2)

    def expect_claim(self, task: str, limit: int | None) -> Held | None:
        if task == "actor" and self.model.budget is None and limit is None:
            limit = 4
        try:
            expected = self.model.next_claim(task, limit)
        except LimitTooSmall:
            with pytest.raises(QueueError, match="whole group"):
                self.driver.claim(task, limit)
            return None
        got = self.driver.claim(task, limit)
        assert (got[1] if got else []) == expected
        if not got:
            return None
        for row_id in expected:
            self.model.set(task, row_id, TaskState.LEASED)
        self.held.append(Held(got[0], task, got[1], list(got[1]), self.now + LEASE_S))
        return self.held[-1]

    @precondition(lambda self: any(held.live for held in self.held))
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        held, rows = self.draw_live(data)
        self.do_ack(held, rows, data.draw(st.integers(1, 9)))

    def do_ack(self, held: Held, rows: list[RowId], length: int) -> None:
        sizes = {"rollout": {"response_ids": length}, "reward": {"reward": 1}, "actor": {}}[held.task]
        self.driver.ack(held.claim, {row_id: sizes for row_id in rows})
        for row_id in rows:
            held.live.remove(row_id)
            self.consumed[held.task, row_id] += 1
            self.model.ack(held.task, row_id, sizes)

    @precondition(lambda self: any(held.live for held in self.held))
    @rule(data=st.data(), everything=st.booleans())
    def nack(self, data: st.DataObject, everything: bool) -> None:
        held, rows = self.draw_live(data)
        self.driver.nack(held.claim, None if everything else rows)
        for row_id in list(held.live) if everything else rows:
            held.live.remove(row_id)
            self.model.set(held.task, row_id, TaskState.READY)

    @precondition(lambda self: any(len(held.live) < len(held.rows) for held in self.held))
    @rule(data=st.data())
    def use_rows_that_are_not_held(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.held if len(held.live) < len(held.rows)]))
        gone = data.draw(st.sampled_from([row_id for row_id in held.rows if row_id not in held.live]))
        error = LeaseError if gone in self.model.rows else StaleRowError
        with pytest.raises(error):
            self.driver.ack(held.claim, {row_id: {} for row_id in [*held.live, gone]})
        with pytest.raises(error):
            self.driver.nack(held.claim, [*held.live, gone])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        if held.live:
            self.driver.renew(held.claim)
            held.deadline = self.now + LEASE_S
        else:
            with pytest.raises(LeaseError):
                self.driver.renew(held.claim)

    @rule(seconds=st.sampled_from([0.1 * LEASE_S, 0.4 * LEASE_S, LEASE_S]))
    def advance(self, seconds: float) -> None:
        self.driver.advance(seconds)
        self.now += seconds
        for held in sorted(self.held, key=lambda held: held.deadline):
            if held.deadline <= self.now:
                self.expired[held.task] += len(held.live)
                for row_id in held.live:
                    self.model.set(held.task, row_id, TaskState.READY)
                held.live.clear()

    @rule()
    def restart(self) -> None:
        self.driver.restart(self.tasks())
        for held in self.held:
            held.live.clear()
        self.model.restart()

    @invariant()
    def counts_are_exact(self) -> None:
        rows, nbytes, tasks = self.driver.stats()
        assert rows == len(self.model.rows)
        assert nbytes in (None, self.model.nbytes)
        for task, stats in tasks.items():
            states = Counter(row.states[task] for row in self.model.rows.values())
            consumed = sum(count for (name, _), count in self.consumed.items() if name == task)
            assert stats == TaskStats(
                waiting=states[TaskState.WAITING],
                ready=states[TaskState.READY],
                leased=states[TaskState.LEASED],
                consumed=consumed,
                expired=self.expired[task],
            )

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            try:
                self.drain()
            finally:
                self.driver.close()

    def drain(self) -> None:
        self.advance(2 * LEASE_S)
        for task in ("rollout", "reward", "actor"):
            while left := sum(len(group) for group in self.model.by_group(task)):
                held = self.expect_claim(task, left)
                assert held is not None
                self.do_ack(held, list(held.live), 3)
        self.counts_are_exact()
        assert not self.model.rows
        assert self.consumed == {(task, row_id): 1 for task in SPECS for row_id in self.issued}

    def draw_live(self, data: st.DataObject) -> tuple[Held, list[RowId]]:
        held = data.draw(st.sampled_from([held for held in self.held if held.live]))
        rows = data.draw(st.lists(st.sampled_from(held.live), min_size=1, unique=True))
        return held, rows
