import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings

from tailrace.errors import ColumnError, GroupExists, LeaseError, QueueError, StaleRowError
from tailrace.planning.balance import partition
from tailrace.transfer.queue.base import NewRow, RowId, TaskStats
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.base import CellFacts, Policy
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.oldest_version import OldestVersionFirst
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.rows.groups import Standing
from tailrace.transfer.queue.rows.state import ControlState, LeaseRecord, RowRecord, TaskState
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import TaskSpec
from tests.transfer.machine import LEASE_S, QueueMachine
from tests.transfer.tables import group, headers, one_task, table


def facts(**lengths: int) -> CellFacts:
    return CellFacts(lengths=lengths)


class ControlDriver:
    """A bare control plane. A claim is its lease id."""

    def __init__(self, tasks: Sequence[QueueTask]) -> None:
        self.plane = ControlPlane(tasks, lease_s=LEASE_S)
        self.now = 0.0

    def put(self, rows: Sequence[NewRow]) -> list[RowId]:
        return self.plane.put(headers(rows), [facts(prompt_ids=len(row.cells["prompt_ids"])) for row in rows])  # type: ignore[arg-type]

    def claim(self, task: str, limit: int | None) -> tuple[int, list[RowId]] | None:
        lease = self.plane.claim(task, limit=limit, now=self.now)
        return None if lease is None else (lease.id, list(lease.rows))

    def ack(self, claim: int, sizes: Mapping[RowId, Mapping[str, int]]) -> None:
        self.plane.ack(claim, {row_id: facts(**columns) for row_id, columns in sizes.items()})

    def nack(self, claim: int, rows: Sequence[RowId] | None) -> None:
        self.plane.nack(claim, rows)

    def renew(self, claim: int) -> None:
        self.plane.renew(claim, self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.plane.expire(self.now)

    def restart(self, tasks: Sequence[QueueTask]) -> None:
        state = self.plane.export()
        self.plane = ControlPlane(tasks, lease_s=LEASE_S)
        self.plane.restore(state)

    def stats(self) -> tuple[int, None, Mapping[str, TaskStats]]:
        return len(self.plane), None, self.plane.stats()

    def close(self) -> None:
        pass


class ControlMachine(QueueMachine):
    def make_driver(self, tasks: Sequence[QueueTask]) -> ControlDriver:
        return ControlDriver(tasks)


TestControlPlaneEqualsAScan = ControlMachine.TestCase
TestControlPlaneEqualsAScan.settings = settings(max_examples=50, stateful_step_count=40)


def plane_of(tasks: Sequence[QueueTask], rows: Sequence[NewRow] = ()) -> tuple[ControlPlane, list[RowId]]:
    plane = ControlPlane(tasks, lease_s=LEASE_S)
    return plane, plane.put(headers(rows), [facts(prompt_ids=2) for _ in rows])


def test_a_row_passes_the_states_of_its_legal_path() -> None:
    plane, [row] = plane_of(table(), group(1))
    assert [plane.state(task, row) for task in ("rollout", "reward")] == [TaskState.READY, TaskState.WAITING]
    lease = plane.claim("rollout", limit=None, now=0.0)
    assert lease is not None
    assert plane.state("rollout", row) is TaskState.LEASED
    assert plane.ack(lease.id, {row: facts(response_ids=3)}) == []
    assert [plane.state(task, row) for task in ("rollout", "reward")] == [TaskState.CONSUMED, TaskState.READY]


def test_a_slot_is_reused_with_the_next_generation() -> None:
    plane, [first] = plane_of(one_task(FirstIn(1)), group(1))
    lease = plane.claim("only", limit=None, now=0.0)
    assert lease is not None
    assert plane.ack(lease.id, {first: facts()}) == [first]
    [second] = plane.put(headers(group(2)), [facts(prompt_ids=2)])
    assert second == RowId(first.slot, first.generation + 1)
    with pytest.raises(StaleRowError, match="gone"):
        plane.state("only", first)


@pytest.mark.parametrize("row_id", [RowId(7, 0), RowId(-1, 0), RowId(0, 1)])
def test_an_id_that_never_was_is_stale(row_id: RowId) -> None:
    plane, _ = plane_of(table(), group(1))
    with pytest.raises(StaleRowError):
        plane.state("rollout", row_id)


def test_a_lease_expires_at_its_deadline_and_not_before() -> None:
    plane, [row] = plane_of(table(), group(1))
    lease = plane.claim("rollout", limit=None, now=5.0)
    assert lease is not None
    assert plane.next_deadline == 5.0 + LEASE_S
    assert plane.expire(4.9 + LEASE_S) == []
    assert plane.expire(5.0 + LEASE_S) == [(lease.id, [row])]
    how = r"after \d+ s.*; hold a claim that takes long with `held`, which renews it, or raise queue\.lease_s"
    with pytest.raises(LeaseError, match=f"is not under lease {lease.id}: the lease expired {how}"):
        plane.ack(lease.id, {row: facts(response_ids=3)})
    with pytest.raises(LeaseError, match=f"lease {lease.id} holds no rows .*it expired {how}"):
        plane.renew(lease.id, 5.0 + LEASE_S)
    assert plane.next_deadline is None


def test_a_refusal_says_why_a_row_is_not_under_a_lease() -> None:
    plane, [first, second] = plane_of(table(FirstIn(2)), group(1, 2))
    lease = plane.claim("rollout", limit=None, now=0.0)
    assert lease is not None
    plane.nack(lease.id, [first])
    with pytest.raises(LeaseError, match="was given back before, or is none of the rows of that claim"):
        plane.nack(lease.id, [first])
    plane.ack(lease.id, {second: facts(response_ids=3)})
    with pytest.raises(LeaseError, match=f"is not under lease {lease.id}: it was acked under it before"):
        plane.nack(lease.id, [second])
    for foreign in (0, lease.id + 1):
        with pytest.raises(LeaseError, match=f"is not under lease {foreign}: there was no such lease"):
            plane.nack(foreign, [first])


def test_a_refused_ack_changes_nothing() -> None:
    plane, [first, second] = plane_of(table(FirstIn(1)), group(1, 2))
    lease = plane.claim("rollout", limit=None, now=0.0)
    assert lease is not None
    before = plane.export(), plane.stats()
    with pytest.raises(LeaseError):
        plane.ack(lease.id, {first: facts(response_ids=3), second: facts(response_ids=3)})
    with pytest.raises(ColumnError, match=r"missing: \['response_ids'\], not its own: \['reward'\]"):
        plane.ack(lease.id, {first: facts(reward=1)})
    assert (plane.export(), plane.stats()) == before
    plane.ack(lease.id, {first: facts(response_ids=3)})


@pytest.mark.parametrize("policy", [WholeGroups(1), TokenBudget(1, window=1, response_column="prompt_ids")])
def test_the_rest_of_a_half_acked_group_comes_again(policy: Policy) -> None:
    plane, [first, second] = plane_of(one_task(policy), group(1, 2))
    lease = plane.claim("only", limit=None, now=0.0)
    assert lease is not None
    plane.ack(lease.id, {first: facts()})
    assert plane.claim("only", limit=None, now=0.0) is None
    plane.expire(LEASE_S)
    again = plane.claim("only", limit=None, now=LEASE_S)
    assert again is not None
    assert list(again.rows) == [second]


def test_restored_groups_arrive_by_order_whatever_their_slots() -> None:
    plane, _ = plane_of(one_task(FirstIn(1)), [*group(3), *group(1), *group(2)])
    restored = ControlPlane(one_task(WholeGroups(3)), lease_s=LEASE_S)
    restored.restore(plane.export())
    lease = restored.claim("only", limit=None, now=0.0)
    assert lease is not None
    assert [row.group_id for row in lease.rows.values()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (group(1, 3)[:2], "group 1 says group_size 3, but 2 of its rows were put"),
        (group(2, 2) + group(2, 1), "group 2 says group_size 2, but 3 of its rows were put"),
        (group(5), "group 5 is in the queue already"),
    ],
)
def test_only_whole_new_groups_go_in(rows: list[NewRow], message: str) -> None:
    plane, _ = plane_of(table(), group(5))
    with pytest.raises(QueueError, match=message):
        plane.put(headers(rows), [facts(prompt_ids=2) for _ in rows])
    assert len(plane) == 1


def test_a_group_comes_once_also_when_all_of_its_rows_have_left() -> None:
    plane, rows = plane_of(one_task(FirstIn(1)), group(1, 2))
    for row in rows:
        with pytest.raises(GroupExists, match="in the queue already"):
            plane.check_groups(headers(group(1)))
        lease = plane.claim("only", limit=None, now=0.0)
        assert lease is not None
        plane.ack(lease.id, {row: facts()})
    with pytest.raises(GroupExists, match="all of its rows were consumed"):
        plane.put(headers(group(1)), [facts(prompt_ids=2)])
    assert len(plane) == 0


def test_reserved_rows_count_and_bar_their_group_until_they_are_withdrawn() -> None:
    plane, _ = plane_of(one_task(FirstIn(9)))
    rows = group(1, 2)
    new = headers(rows)
    ids = plane.reserve(new)
    assert len(plane) == 2
    assert plane.check_groups(new) is Standing.BEING_PUT
    with pytest.raises(GroupExists, match="group 1 is being put already"):
        plane.put(new, [facts(prompt_ids=2)] * 2)
    assert plane.claim("only", limit=None, now=0.0) is None
    plane.withdraw(ids, headers(rows))
    assert len(plane) == 0
    again = plane.put(headers(rows), [facts(prompt_ids=2)] * 2)
    assert {(row.slot, row.generation - 1) for row in again} == set(ids), "their ids are stale"


def stored_on(plane: ControlPlane, unit: int, rows: list[NewRow], *others: int) -> list[RowId]:
    ids = plane.reserve(headers(rows))
    plane.enter(ids, headers(rows), [facts(prompt_ids=2) for _ in rows], units=(unit, *others))
    return ids


def worked(plane: ControlPlane, task: str, *, limit: int | None = None, **outputs: int) -> list[RowId]:
    """Claim and ack, and return the rows."""
    lease = plane.claim(task, limit=limit, now=0.0)
    assert lease is not None
    rows = list(lease.rows)
    plane.ack(lease.id, {row: facts(**outputs) for row in rows})
    return rows


def test_rows_of_a_dead_unit_leave_with_their_groups_whatever_their_state_and_others_stay() -> None:
    plane, _ = plane_of(table(FirstIn(9)))
    first = stored_on(plane, 1, group(1, 2))
    second = stored_on(plane, 2, group(2, 2))
    worked(plane, "rollout", limit=1, response_ids=3)
    lease = plane.claim("rollout", limit=1, now=0.0)
    assert lease is not None
    assert plane.lose(1) == (dict.fromkeys(first, ()), [1])
    assert (len(plane), plane.lost_groups) == (2, {1: 0})
    with pytest.raises(StaleRowError):
        plane.ack(lease.id, {first[1]: facts(response_ids=3)})
    counts = plane.stats()
    assert (counts["rollout"].ready, counts["rollout"].leased, counts["reward"].ready) == (2, 0, 0)
    assert worked(plane, "rollout", response_ids=3) == second


def test_a_lost_group_is_put_again_whole_and_passes_all_but_those_who_have_the_last_word() -> None:
    """The group's first row had passed every task, its second all but the actor."""
    plane, _ = plane_of(table(FirstIn(9)))
    rows = group(1, 2)
    stored_on(plane, 1, rows)
    worked(plane, "rollout", response_ids=3)
    while "reward" in plane.ready_tasks:
        worked(plane, "reward", reward=1)
    lease = plane.claim("actor", limit=2, now=0.0)
    assert lease is not None
    done = next(iter(lease.rows))
    plane.ack(lease.id, {done: facts()})
    assert plane.lose(1).groups == [1]
    with pytest.raises(QueueError, match="group_size 2, but 1"):
        plane.put(headers(rows[:1]), [facts(prompt_ids=2)])
    stored_on(plane, 2, rows)
    assert plane.lost_groups == {}
    assert len(worked(plane, "rollout", response_ids=3)) == 2
    while "reward" in plane.ready_tasks:
        worked(plane, "reward", reward=1)
    assert done not in worked(plane, "actor", limit=1)
    assert len(plane) == 0
    assert plane.stats()["actor"].consumed == 2, "each row once"


def test_a_lost_group_bars_later_windows_in_a_restored_queue_too() -> None:
    plane, _ = plane_of(one_task(TokenBudget(None, window=200)))
    for group_id in range(4):
        stored_on(plane, group_id, group(group_id, 2))
    worked(plane, "only", limit=2)
    plane.lose(1)
    restored, _ = plane_of(one_task(TokenBudget(None, window=200)))
    restored.restore(plane.export())
    assert restored.claim("only", limit=2, now=0.0) is None
    again = stored_on(restored, 9, group(1, 2))
    assert worked(restored, "only", limit=2) == again
    assert len(worked(restored, "only", limit=2)) == 2


@pytest.mark.parametrize("restored", [False, True])
def test_a_part_of_a_step_that_comes_again_is_handed_out_by_itself_in_a_restored_queue_too(restored: bool) -> None:
    def tasks() -> list[QueueTask]:
        return [
            QueueTask(TaskSpec(name=name, reads=reads, writes=writes), TokenBudget(None, window=200))
            for name, reads, writes in (
                ("advantages", ("prompt_ids",), ("advantages",)),
                ("actor", ("advantages",), ()),
            )
        ]

    plane, _ = plane_of(tasks())
    for group_id in range(4):
        stored_on(plane, group_id, group(group_id))
    assert len(worked(plane, "advantages", limit=2, advantages=1)) == 2
    if restored:
        before = plane.export()
        plane, _ = plane_of(tasks())
        plane.restore(before)
    plane.lose(1)
    again = stored_on(plane, 9, group(1))
    assert worked(plane, "advantages", limit=2, advantages=1) == again
    assert len(worked(plane, "advantages", limit=2, advantages=1)) == 2


def test_a_row_that_every_task_had_consumed_leaves_at_once_when_its_lost_group_comes_again() -> None:
    plane, _ = plane_of(one_task(FirstIn(1)))
    rows = group(1, 2)
    stored_on(plane, 1, rows)
    worked(plane, "only")
    plane.lose(1)
    ids = plane.reserve(headers(rows))
    assert plane.enter(ids, headers(rows), [facts(prompt_ids=2)] * 2, units=(2,)) == ids[:1]
    assert worked(plane, "only") == ids[1:]
    assert len(plane) == 0


def test_a_row_with_another_unit_is_not_lost() -> None:
    plane, _ = plane_of(one_task(FirstIn(9)))
    [row] = stored_on(plane, 1, group(1), 2)
    assert plane.lose(1) == ({}, [])
    assert plane.units(row) == (2,)
    assert plane.lose(2) == ({row: ()}, [1])


def test_a_unit_that_missed_outputs_counts_no_more_and_one_has_to_have_them() -> None:
    plane, _ = plane_of(table())
    [row] = stored_on(plane, 1, group(1), 2)
    lease = plane.claim("rollout", limit=None, now=0.0)
    assert lease is not None
    with pytest.raises(StaleRowError, match="could be written to none of its units"):
        plane.ack(lease.id, {row: facts(response_ids=3)}, missed=[1, 2])
    plane.ack(lease.id, {row: facts(response_ids=3)}, missed=[1])
    assert plane.units(row) == (2,)


def test_the_tag_of_a_column_is_the_lease_that_wrote_it() -> None:
    plane, [row] = plane_of(table(), group(1))
    lease = plane.claim("rollout", limit=None, now=0.0)
    assert lease is not None
    plane.ack(lease.id, {row: facts(response_ids=3)})
    spec = next(entry.spec for entry in table() if entry.spec.name == "reward")
    tags = dict(zip(spec.reads, plane.tags("reward", row), strict=True))
    assert tags["response_ids"] == lease.id > 0
    assert all(tag == 0 for column, tag in tags.items() if column != "response_ids")


def test_leases_that_go_on_are_leased_after_a_restore() -> None:
    plane, rows = plane_of(table(FirstIn(9)), group(1, 3))
    lease = plane.claim("rollout", limit=2, now=0.0)
    assert lease is not None
    restored = ControlPlane(table(FirstIn(9)), lease_s=LEASE_S)
    restored.restore(plane.export(), leases=[LeaseRecord(lease.id, "rollout", list(lease.rows))], now=5.0)
    assert restored.stats()["rollout"] == plane.stats()["rollout"]
    assert restored.next_deadline == 5.0 + LEASE_S
    restored.ack(lease.id, {row: facts(response_ids=3) for row in lease.rows})
    assert worked(restored, "rollout", response_ids=3) == rows[2:]


def state(**changes: Any) -> ControlState:
    rows = [record(consumed={0: 2})]
    fields: dict[str, Any] = {"generations": [4, 2], "next_lease": 3, "rows": rows, "consumed": [9, 8, 7]}
    fields |= {"version": 5, "seen": [(0, 2), (4, 5)], "lost": [], "remade": {}, "expired": [0, 0, 1]}
    return ControlState(**{**fields, **changes})


def record(consumed: dict[int, int]) -> RowRecord:
    cells = facts(prompt_ids=2, response_ids=3)
    return RowRecord(id=RowId(0, 4), group_id=1, group_size=1, order=1, consumed=consumed, facts=cells, units=(7,))


def test_a_restored_plane_goes_on_with_generations_leases_and_counters() -> None:
    plane = ControlPlane(table(), lease_s=LEASE_S)
    plane.restore(state())
    assert plane.export() == state()
    assert plane.put(headers(group(7)), [facts(prompt_ids=2)]) == [RowId(1, 2)]
    lease = plane.claim("rollout", limit=None, now=0.0)
    assert lease is not None
    assert lease.id == 3
    with pytest.raises(QueueError, match="has held rows"):
        plane.restore(state())


@pytest.mark.parametrize(
    "changes",
    [
        {"generations": [3]},
        {"generations": []},
        {"rows": state().rows * 2},
        {"consumed": [1]},
        {"rows": [record({0: 1, 1: 2, 2: 3})]},
        {"rows": [record({3: 1})]},
    ],
)
def test_a_state_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    plane = ControlPlane(table(), lease_s=LEASE_S)
    with pytest.raises(QueueError, match="contradicts itself"):
        plane.restore(state(**changes))
    assert len(plane) == 0


class CountedOrder(int):
    """An order that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountedOrder.comparisons += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        CountedOrder.comparisons += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


def lines_run(call: Callable[[], None]) -> int:
    """The number of lines of the package that `call` executes."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_globals["__name__"].startswith("tailrace"):
            return None
        lines += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return lines


def claim_cost(policy: Policy, groups: int, rank: int | None) -> tuple[int, int]:
    """The lines run and orders compared by one claim and ack among `groups` groups of 4."""
    plane = ControlPlane(one_task(policy), lease_s=LEASE_S)
    for number in range(groups):
        plane.put(headers(group(number, 4, order=CountedOrder(number * 4))), [facts(prompt_ids=2)] * 4)

    def claim_and_ack() -> None:
        lease = plane.claim("only", limit=None, rank=rank, now=0.0)
        assert lease is not None
        assert len(lease.rows) == 8
        plane.ack(lease.id, {row_id: facts() for row_id in lease.rows})

    CountedOrder.comparisons = 0
    return lines_run(claim_and_ack), CountedOrder.comparisons


@pytest.mark.parametrize(
    ("make", "rank"),
    [
        (lambda: FirstIn(8), None),
        (lambda: OldestVersionFirst(8), None),
        (lambda: WholeGroups(2), None),
        (lambda: TokenBudget(20, window=1, response_column="prompt_ids"), None),
        (
            lambda: BalancedByLength(
                1, 8, partition=partial(partition, equal_count=False), cost_columns=("prompt_ids",)
            ),
            0,
        ),
    ],
)
def test_the_cost_of_a_claim_does_not_grow_with_the_rows_stored(make: Callable[[], Policy], rank: int | None) -> None:
    few_lines, few_comparisons = claim_cost(make(), 30, rank)
    many_lines, many_comparisons = claim_cost(make(), 3000, rank)
    assert many_lines == few_lines
    assert many_comparisons <= 3 * few_comparisons, "a heap's depth grows by 7 levels, no more"


def waiting_cost(groups: int) -> int:
    """The lines run by a claim that has to wait for more than `groups` groups, after 100 were handed out."""
    plane = ControlPlane(one_task(TokenBudget(420, window=None, response_column="prompt_ids")), lease_s=LEASE_S)

    def put(numbers: range) -> None:
        for number in numbers:
            plane.put(headers(group(number)), [facts(prompt_ids=2)])

    def claim(expected: int) -> None:
        lease = plane.claim("only", limit=100, now=0.0)
        assert (0 if lease is None else len(lease.rows)) == expected

    put(range(100))
    claim(100)
    put(range(100, 100 + groups))
    return lines_run(lambda: claim(0))


def test_the_cost_of_waiting_does_not_grow_with_what_is_gathered() -> None:
    assert waiting_cost(40) == waiting_cost(2)


def test_a_row_keeps_its_version_through_an_export() -> None:
    plane, rows = plane_of(table(FirstIn(2)), group(1, 2))
    lease = plane.claim("rollout", limit=None, now=0.0)
    assert lease is not None
    written = [CellFacts(lengths={"response_ids": 3}, version=version) for version in (4, None)]
    plane.ack(lease.id, dict(zip(rows, written, strict=True)))
    state = plane.export()
    assert [record.facts.version for record in state.rows] == [4, None]
    restored = ControlPlane(table(), lease_s=LEASE_S)
    restored.restore(state)
    assert restored.export() == state


def remaking() -> tuple[ControlPlane, int]:
    """Two groups of 2 that have passed `rollout`, and a lease of both for `reward`."""
    plane, _ = plane_of(table(WholeGroups(9), WholeGroups(9)), [*group(1, 2), *group(2, 2)])
    worked(plane, "rollout", response_ids=3)
    lease = plane.claim("reward", limit=None, now=0.0)
    assert lease is not None
    return plane, lease.id


def test_a_remade_group_leaves_all_tasks_and_comes_to_all_of_them_again() -> None:
    plane, lease = remaking()
    loss = plane.remake(lease, [1], most=1)
    assert (loss.groups, len(loss.rows), len(plane), plane.lost_groups) == ([1], 2, 2, {1: 1})
    assert [plane.facts(row).lengths["prompt_ids"] for row in plane.leased(lease)] == [2, 2], "of the other group"
    plane.put(headers(group(1, 2)), [facts(prompt_ids=5)] * 2)
    assert plane.lost_groups == {}
    assert len(worked(plane, "rollout", response_ids=3)) == 2
    assert plane.stats()["reward"].ready == 2


def test_a_group_is_remade_as_often_as_is_allowed_also_after_a_restore() -> None:
    plane, lease = remaking()
    assert plane.remake(lease, [1, 2], most=0).groups == []
    assert plane.remake(lease, [1], most=2).groups == [1]
    restored = ControlPlane(table(WholeGroups(9), WholeGroups(9)), lease_s=LEASE_S)
    restored.restore(plane.export())
    assert restored.lost_groups == {1: 1}
    restored.put(headers(group(1, 2)), [facts(prompt_ids=5)] * 2)
    worked(restored, "rollout", response_ids=3)
    again = restored.claim("reward", limit=None, now=0.0)
    assert again is not None
    assert restored.remake(again.id, [1, 2], most=1).groups == [2]
    assert restored.remake(again.id, [1], most=2).groups == [1]
    assert restored.lost_groups == {1: 2, 2: 1}


def test_how_often_a_group_was_remade_is_forgotten_when_it_has_left() -> None:
    plane, lease = remaking()
    plane.remake(lease, [1], most=1)
    plane.put(headers(group(1, 2)), [facts(prompt_ids=5)] * 2)
    assert plane.export().remade == {1: 1}
    plane.nack(lease, None)
    worked(plane, "rollout", response_ids=3)
    while "reward" in plane.ready_tasks:
        worked(plane, "reward", reward=1)
    while "actor" in plane.ready_tasks:
        worked(plane, "actor", limit=2)
    assert len(plane) == 0
    assert plane.export().remade == {}


def test_a_part_of_a_group_is_not_remade() -> None:
    plane, lease = remaking()
    plane.ack(lease, {plane.leased(lease)[0]: facts(reward=1)})
    with pytest.raises(QueueError, match="1 rows of group 1 are under lease"):
        plane.remake(lease, [2, 1], most=9)
    with pytest.raises(LeaseError, match="has ended"):
        plane.remake(99, [2], most=9)
    assert plane.lost_groups == {}
    assert len(plane) == 4
