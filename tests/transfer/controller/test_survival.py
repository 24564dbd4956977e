from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import (
    LeaseError,
    PeerLost,
    QueueError,
    StaleRowError,
    UserError,
)
from tailrace.planning.balance import partition
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import (
    NO_UNIT,
    Admitted,
    Advance,
    Claim,
    Claimed,
    Dismiss,
    Export,
    Exported,
    Groups,
    Lost,
    Release,
    Remake,
    Renew,
    Restore,
    Retire,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.messages import Beat
from tests.transfer.controller.fakes import FakeUnit, Site
from tests.transfer.controller.talk import (
    LIMIT_S,
    ack,
    ack_missing,
    alive,
    claim,
    replaced,
    site,
    stats,
    store,
    work,
    write,
)
from tests.transfer.controller.test_controller_machine import admit
from tests.transfer.tables import group, one_task, table


def test_rows_of_a_unit_that_falls_silent_are_lost_and_put_again(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    first, second = queue.units
    waiting = queue.send(Lost(1000.0))
    rows = store(queue, group(1, 2))
    lost, other = (first, second) if first.parts else (second, first)
    lease, held = claim(queue, "rollout")
    alive(queue, LIMIT_S + 1, other)
    answer: Groups = queue.answer(waiting)
    assert unpack(answer.ids, 2).tolist() == [[1, 0]]
    assert stats(queue).lost_groups == 1
    assert [unit.number for unit in stats(queue).units] == [other.number]
    with pytest.raises(StaleRowError):
        ack(queue, lease, held, response_ids=3)
    assert set(rows).isdisjoint(store(queue, group(1, 2)))
    assert stats(queue).lost_groups == 0
    assert len(other.parts) == 2
    assert not lost.parts or lost.number != other.number


def test_a_lost_group_goes_before_those_who_wait_for_room(tmp_path: Path) -> None:
    queue = site(tmp_path, max_rows=2)
    [unit] = queue.units
    store(queue, group(1, 2))
    blocked = queue.send(replaced(admit(group(2, 2)), wait_s=100.0))
    assert "2 of 2 rows" in str(stats(queue).blocked_by)
    unit.die()
    queue.join(unit)
    assert stats(queue).lost_groups == 1
    assert queue.answer(blocked) is not None, "the loss made room"
    store(queue, group(1, 2))
    assert stats(queue).rows == 4, "the room that a lost group takes was its own before"


def test_with_replicas_a_dead_unit_loses_nothing(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    rows = store(queue, group(1, 2))
    work(queue, "rollout", response_ids=3)
    alive(queue, LIMIT_S + 1, queue.units[0])
    assert (stats(queue).rows, stats(queue).lost_groups) == (2, 0)
    claimed: Claimed = queue.ask(Claim("reward", None, None, 0.0))
    assert unpack(claimed.units, 1).tolist() == [[queue.units[0].number]] * 2
    assert row_ids(pack(unpack(claimed.rows, 4)[:, :2])) == rows


def test_a_unit_that_missed_outputs_is_not_read_from_again(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    store(queue, group(1, 1))
    lease, rows = claim(queue, "rollout")
    ack_missing(queue, lease, rows, {"response_ids": 3}, [1])
    claimed: Claimed = queue.ask(Claim("reward", None, None, 0.0))
    assert unpack(claimed.units, claimed.width).tolist() == [[0]]
    assert NO_UNIT not in unpack(claimed.units, claimed.width)


def test_a_unit_of_lasting_storage_keeps_its_rows_through_a_restart(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    rows = store(queue, group(1, 2))
    lease, _ = claim(queue, "rollout")
    ack(queue, lease, rows, response_ids=3)
    unit.parts.add(PartId(7, 7, 0))
    unit.die()
    queue.join(unit)
    queue.tick(1.0)
    assert stats(queue).lost_groups == 0
    assert PartId(7, 7, 0) not in unit.parts, "of a row that is not there"
    assert unit.parts == {PartId(*row, tag) for row in rows for tag in (0, lease)}


def test_a_row_whose_outputs_a_unit_lacks_is_lost_with_its_group(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    store(queue, group(1, 2))
    store(queue, group(2, 1))
    lease, rows = claim(queue, "rollout")
    ack(queue, lease, rows, response_ids=3)
    unit.parts.discard(PartId(*rows[0], lease))
    unit.die()
    queue.join(unit)
    assert (stats(queue).rows, stats(queue).lost_groups) == (1, 1)


def test_a_controller_that_is_started_anew_waits_for_its_units_up_to_their_limit(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    first, second = queue.units
    store(queue, group(1, 2))
    store(queue, group(2, 2))
    queue.units = [first]
    queue.start()
    waiting = queue.send(Claim("rollout", None, None, 100.0))
    assert queue.answer(waiting) is None, "the second unit may come back"
    assert queue.table().recovering
    alive(queue, LIMIT_S, first)
    claimed: Claimed = queue.answer(waiting)
    assert len(unpack(claimed.rows, 4)) == 2
    assert stats(queue).lost_groups == 1
    assert second.parts
    assert not queue.table().recovering


def test_a_unit_that_joins_and_never_says_what_it_has_stops_nobody_for_long(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    good, mute = queue.units
    store(queue, group(1, 1))
    store(queue, group(2, 1))
    mute.mute = True
    mute.die()
    queue.join(mute)
    assert len(claim(queue, "rollout", limit=1)[1]) == 1, "others are served at once"
    store(queue, group(3, 1))
    good.mute = True
    queue.start()
    waiting = queue.send(Claim("rollout", 1, None, 100.0))
    alive(queue, LIMIT_S - 1, good, mute)
    assert queue.answer(waiting) is None, "its rows may be there"
    alive(queue, 2, good, mute)
    assert stats(queue).rows == 0
    assert stats(queue).lost_groups == 3


def test_clients_are_told_of_a_unit_from_its_join_to_its_death(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    unit.mute = True
    queue.start()
    assert [listed.number for listed in queue.table().units] == [unit.number], "it answers, not ready yet"
    queue.tick(LIMIT_S)
    assert queue.table().units == []


def test_a_controller_started_anew_learns_from_units_what_was_written_meanwhile(tmp_path: Path) -> None:
    queue = site(tmp_path)
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    queue.units[0].parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    queue.start()
    assert len(claim(queue, "rollout")[1]) == 2


def test_a_watch_outlasts_the_controller(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=1000.0)
    store(queue, group(1, 1))
    queue.ask(Beat(5.0), "silent")
    claim(queue, "rollout", client="silent")
    queue.start()
    assert stats(queue).tasks["rollout"].leased == 1
    alive(queue, 6, *queue.units)
    assert stats(queue).tasks["rollout"].ready == 1


def test_a_snapshot_is_of_one_moment_and_its_parts_stay_until_it_was_read(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    store(queue, group(1, 1))
    work(queue, "rollout", response_ids=3)
    work(queue, "reward", reward=1)
    exported: Exported = queue.ask(Export())
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    queue.tick(1.0)
    assert stats(queue).rows == 0
    assert len(unit.parts) == 3
    queue.ask(Release(exported.hold))
    queue.tick(1.0)
    assert not unit.parts
    assert [record.consumed.keys() for record in exported.state.rows] == [{0, 1}]


def test_a_snapshot_keeps_no_rows_that_had_left_before_it(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units

    def pass_through(number: int) -> None:
        store(queue, group(number, 1))
        work(queue, "rollout", response_ids=3)
        work(queue, "reward", reward=1)
        lease, rows = claim(queue, "actor", limit=1)
        ack(queue, lease, rows)
        queue.tick(1.0)

    first = queue.ask(Export()).hold
    pass_through(1)
    second = queue.ask(Export()).hold
    pass_through(2)
    assert len(unit.parts) == 6
    queue.ask(Release(first))
    queue.tick(1.0)
    assert len(unit.parts) == 3, "those of the second row"
    queue.ask(Release(second))
    queue.tick(1.0)
    assert not unit.parts


def test_a_reader_of_a_snapshot_that_dies_lets_go_of_it(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 1))
    queue.ask(Export(), "reader")
    work(queue, "rollout", response_ids=1)
    work(queue, "reward", reward=1)
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    queue.ask(Dismiss("reader"))
    queue.tick(1.0)
    assert not queue.units[0].parts


def test_puts_wait_while_a_snapshot_is_restored_and_a_second_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old = site(tmp_path / "old")
    store(old, group(1, 2))
    state = old.ask(Export()).state
    queue = site(tmp_path)
    admitted: Admitted = queue.ask(Restore(state))
    waiting = queue.send(replaced(admit(group(2, 1)), wait_s=100.0))
    assert "being restored" in str(stats(queue).blocked_by)
    with pytest.raises(QueueError, match="another snapshot"):
        queue.ask(Restore(state))
    write(queue, admitted)
    assert queue.answer(waiting) is not None
    assert stats(queue).tasks["rollout"].ready == 2
    with pytest.raises(QueueError, match="has held rows"):
        queue.ask(Restore(state))
    queue.start()
    assert stats(queue).tasks["rollout"].ready == 2, "the journal has the snapshot"


def test_a_table_of_another_journal_is_refused(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 1))
    with pytest.raises(QueueError, match="another table"):
        Site(lambda: table()[:2], tmp_path)


def test_a_lasting_unit_that_was_dead_is_another_one_when_it_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    store(queue, group(1, 1))
    queue.tick(LIMIT_S + 1)
    queue.join(unit)
    queue.tick(1.0)
    assert not unit.parts, "its rows were lost"
    rows = store(queue, group(1, 1))
    queue.start()
    queue.tick(1.0)
    assert unit.parts == {PartId(*row, 0) for row in rows}
    assert claim(queue, "rollout")[1] == rows


def test_no_unit_gets_the_number_of_one_that_has_died(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    numbers = [unit.number]
    for restart in (False, True, True):
        unit.die()
        queue.join(unit)
        if restart:
            queue.start()
        numbers.append(unit.number)
    assert numbers == [0, 1, 2, 3]


def test_a_unit_may_leave_while_the_others_have_not_come_back_after_a_restart(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    first, second = queue.units
    rows = store(queue, group(1, 2))
    queue.start(away=[second])
    queue.ask(Retire(first.name))
    queue.tick(1.0)
    queue.join(first)
    assert queue.units == [first, second], "it waits for the other to take its rows"
    queue.join(second)
    while first in queue.units:
        queue.copy()
        queue.join(first)
    assert second.parts == {PartId(*row, 0) for row in rows}
    with pytest.raises(UserError, match=f"^{second.name} is the last unit of the queue; add another one first$"):
        queue.ask(Retire(second.name))


@pytest.mark.parametrize("lasting", [False, True])
def test_a_unit_that_dies_while_it_leaves_leaves_when_it_is_back(tmp_path: Path, lasting: bool) -> None:
    units = [FakeUnit("a", lasting=lasting), FakeUnit("b")]
    queue = Site(table, tmp_path, units=units, unit_limit_s=LIMIT_S)
    store(queue, group(1, 2))
    queue.ask(Retire("a"))
    units[0].die()
    queue.join(units[0])
    for _ in range(5):
        queue.copy()
        if units[0] in queue.units:
            queue.join(units[0])
    assert queue.units == [units[1]]


def test_groups_that_are_leased_bar_nobody_after_a_restart(tmp_path: Path) -> None:
    queue = Site(lambda: table(FirstIn(9), actor=TokenBudget(1, window=1)), tmp_path, unit_limit_s=LIMIT_S)
    for number in (1, 2):
        store(queue, group(number, 2))
    work(queue, "rollout", response_ids=1)
    for _ in range(2):
        work(queue, "reward", reward=1)
    lease, first = claim(queue, "actor", limit=2)
    queue.start()
    _, second = claim(queue, "actor", limit=2)
    assert len(second) == 2
    ack(queue, lease, first)
    assert stats(queue).rows == 2


def test_a_batch_that_was_split_is_split_anew_after_a_restart(tmp_path: Path) -> None:
    """Otherwise a rank could keep its old part while the other waits for its own for ever."""

    def tasks() -> tuple[QueueTask, ...]:
        return one_task(
            BalancedByLength(2, 4, partition=partial(partition, equal_count=False), cost_columns=("prompt_ids",))
        )

    queue = Site(tasks, tmp_path, unit_limit_s=LIMIT_S)
    store(queue, group(1, 4))
    first: Claimed = queue.ask(Claim("only", None, 0, 0.0))
    queue.start()
    with pytest.raises(LeaseError):
        queue.ask(Renew(first.lease_id))
    parts = [len(unpack(queue.ask(Claim("only", None, rank, 0.0)).rows, 4)) for rank in (1, 0)]
    assert parts == [2, 2]


def test_a_snapshot_whose_restoring_broke_off_is_restored_by_another_try(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old = site(tmp_path / "old")
    store(old, group(1, 2))
    state = old.ask(Export()).state
    queue = site(tmp_path)
    [unit] = queue.units
    admitted: Admitted = queue.ask(Restore(state), "dies")
    unit.parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    queue.ask(Dismiss("dies"))
    queue.tick(1.0)
    assert (unit.parts, unit.left) == (set(), set())
    queue.ask(Restore(state), "dies with the controller")
    unit.parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    queue.start()
    queue.tick(1.0)
    assert (unit.parts, unit.left) == (set(), set()), "told that they have left, it would take them never again"
    write(queue, queue.ask(Restore(state)))
    assert stats(queue).tasks["rollout"].ready == 2


def test_a_snapshot_takes_no_weight_version_back(tmp_path: Path) -> None:
    queue = site(tmp_path)
    state = queue.ask(Export()).state
    queue.ask(Advance(5))
    queue.ask(Restore(state))
    assert stats(queue).version == 5


@pytest.mark.parametrize("end", ["too late", "dead"])
def test_rows_of_leases_that_end_together_are_handed_out_after_the_journal_has_all_of_it(
    tmp_path: Path, end: str
) -> None:
    queue = site(tmp_path, lease_s=5.0)
    rows = store(queue, group(1, 3))
    queue.ask(Beat(5.0))
    for _ in rows:
        claim(queue, "rollout", limit=1)
    waiting = [queue.send(Claim("rollout", 9, None, 100.0), client=f"other-{number}") for number in range(2)]
    if end == "dead":
        queue.ask(Dismiss("client"), "another")
    else:
        queue.tick(5.0)
    assert row_ids(pack(unpack(queue.answer(waiting[0]).rows, 4)[:, :2])) == rows
    queue.start()
    assert stats(queue).tasks["rollout"].leased == 3


def test_leases_of_lost_rows_are_forgotten(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 2))
    claim(queue, "rollout")
    queue.units[0].die()
    queue.join(queue.units[0])
    assert queue.controller._leases.leases() == []
    assert not queue.controller._leases._holders


def test_a_snapshot_that_nobody_lets_go_of_is_held_for_as_long_as_a_lease(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=5.0)
    store(queue, group(1, 1))
    queue.ask(Export())
    work(queue, "rollout", response_ids=1)
    work(queue, "reward", reward=1)
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    alive(queue, 4, *queue.units)
    assert queue.units[0].parts
    alive(queue, 2, *queue.units)
    assert not queue.units[0].parts


def test_a_unit_that_fails_to_forget_parts_is_asked_what_it_has(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    store(queue, group(1, 1))
    for task, lengths in (("rollout", {"response_ids": 1}), ("reward", {"reward": 1})):
        work(queue, task, **lengths)
    unit.failures = [PeerLost("silent")]
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    queue.tick(1.0)
    assert unit.parts
    alive(queue, 2, unit)
    assert not unit.parts


def test_groups_that_were_remade_are_so_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    rows = store(queue, group(1, 2)) + store(queue, group(2, 2))
    lease, held = claim(queue, "rollout")
    assert len(held) == 4
    taken: Groups = queue.ask(Remake(lease, pack(np.array([1], dtype=np.int64)), 1))
    assert unpack(taken.ids, 2).tolist() == [[1, 0]]
    queue.tick(1.0)
    assert {RowId(*part[:2]) for part in unit.parts} == set(rows[2:]), "the unit has dropped the others"
    queue.start()
    queue.tick(1.0)
    answer: Groups = queue.ask(Lost(0.0))
    assert unpack(answer.ids, 2).tolist() == [[1, 1]]
    store(queue, group(1, 2))
    assert (stats(queue).rows, stats(queue).lost_groups) == (4, 0)
