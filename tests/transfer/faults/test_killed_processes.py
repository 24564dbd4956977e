"""Processes are killed at random moments, and every row is consumed exactly once.

Operations are under way at each death: puts between Admit and Write, claims in the journal that are not yet answered,
outputs that are written and not acked. Each kind of storage has rounds of its own.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tailrace.config.queue_table import AddedUnitConfig
from tailrace.config.transfer import ArenaStorageConfig, RedisStorageConfig, ServiceQueueConfig, StorageConfig
from tailrace.transfer.queue.client.look import retire_unit
from tailrace.transfer.queue.processes import vitals
from tailrace.transfer.queue.processes.added import add_unit
from tailrace.transfer.queue.processes.several import queue_processes
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tests.helpers.effort import effort
from tests.helpers.waiting import until
from tests.transfer.faults.chaos import UNITS, Chaos, chaos
from tests.transfer.faults.rows import GROUP_SIZE, TABLE
from tests.transfer.faults.worker import SILENCE_S, TIMEOUT_S


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in memory that must be empty in the end."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
        assert list(Path(directory).iterdir()) == []


@pytest.fixture(autouse=True)
def _as_many_deaths_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "MAX_DEATHS", 10**6)


def settings(
    storage: StorageConfig, *, replicas: int = 1, unit_limit_s: float = 20.0, controllers: int = 1
) -> ServiceQueueConfig:
    """Settings whose `unit_limit_s` is long, so that a unit that is slow to restart does not count as dead."""
    return ServiceQueueConfig(
        controllers=controllers,
        storage=storage,
        replicas=replicas,
        max_rows=12 * GROUP_SIZE,
        lease_s=3 * SILENCE_S,
        unit_limit_s=unit_limit_s,
    )


def check(hand: Chaos, groups: int) -> None:
    """Audit the remaining groups. Assert that each task acked each of its rows once, and the audit every row once."""
    hand.end(groups)
    acks = hand.acks()
    assert set(acks.values()) == {1}
    audited = Counter(order for task, _, order in acks if task == "audit")
    assert audited == Counter(range(groups * GROUP_SIZE))
    assert {order for task, _, order in acks if task == "work"} == set(audited)


def test_rows_outlive_all_but_their_unit_and_groups_that_died_with_it_are_put_again(
    tmp_path: Path, shared: Path
) -> None:
    rounds = effort(90, 24)
    storage = ArenaStorageConfig(directory=str(shared))
    with (
        QueueProcesses(settings(storage, unit_limit_s=2 * SILENCE_S), TABLE, tmp_path) as processes,
        chaos(processes, groups=4 * rounds, seed=1) as hand,
    ):
        for _ in range(rounds):
            hand.round()
        check(hand, 4 * rounds)
        assert hand.feeder.lost


def test_rows_of_two_controllers_outlive_all_but_their_unit_while_others_join_and_leave(
    tmp_path: Path, shared: Path
) -> None:
    rounds, visits = effort(60, 16), 4
    storage = ArenaStorageConfig(directory=str(shared))
    two = settings(storage, unit_limit_s=2 * SILENCE_S, controllers=2)
    config = AddedUnitConfig(storage=storage)
    had_rows = 0
    with queue_processes(two, TABLE, tmp_path) as processes, chaos(processes, groups=4 * rounds, seed=5) as hand:
        for visit in range(visits):
            name = f"added-{visit}"
            with add_unit(processes.address, config, log=tmp_path / f"{name}.log", name=name):
                for _ in range(rounds // visits):
                    hand.round()
                    had_rows += hand.has_rows(name)
        check(hand, 4 * rounds)
        assert hand.deaths["controller-0"]
        assert hand.deaths["controller-1"]
        assert any(hand.deaths[unit] for unit in UNITS)
        assert had_rows, "added units hand rows on"


def test_no_group_is_lost_with_a_unit_when_there_are_two_of_each_row(tmp_path: Path, shared: Path) -> None:
    rounds = effort(60, 15)
    storage = ArenaStorageConfig(directory=str(shared))
    with (
        QueueProcesses(settings(storage, replicas=2), TABLE, tmp_path) as processes,
        chaos(processes, groups=4 * rounds, seed=2) as hand,
    ):
        for _ in range(rounds):
            hand.round(units_may_die=hand.all_rows_are_on_both_units)
        check(hand, 4 * rounds)
        assert hand.feeder.lost == []
        assert any(hand.deaths[unit] for unit in UNITS)


def test_no_group_is_lost_with_a_unit_whose_storage_lasts(tmp_path: Path, redis_url: str) -> None:
    rounds = effort(60, 15)
    with (
        QueueProcesses(settings(RedisStorageConfig(url=redis_url)), TABLE, tmp_path) as processes,
        chaos(processes, groups=4 * rounds, seed=3) as hand,
    ):
        for _ in range(rounds):
            hand.round()
        check(hand, 4 * rounds)
        assert hand.feeder.lost == []
        assert any(hand.deaths[unit] for unit in UNITS)


def test_no_group_is_lost_with_a_unit_that_leaves_while_others_are_killed(tmp_path: Path, shared: Path) -> None:
    rounds = effort(24, 10)
    storage = ArenaStorageConfig(directory=str(shared))
    with (
        QueueProcesses(settings(storage), TABLE, tmp_path) as processes,
        chaos(processes, groups=4 * rounds, seed=4) as hand,
        add_unit(processes.address, AddedUnitConfig(storage=storage), log=tmp_path / "added.log", name="added"),
    ):
        for number in range(rounds):
            if number == rounds // 4:
                retire_unit(processes.address, "unit-0", limit_s=TIMEOUT_S)
            hand.round(units_may_die=lambda: False)
        until(lambda: "unit-0" not in processes.pids)
        check(hand, 4 * rounds)
        assert hand.feeder.lost == []
