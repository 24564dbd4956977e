"""A unit joins a running queue, takes rows, and hands them on before it leaves; a mistake is one line."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.config.queue_table import AddedUnitConfig
from tailrace.config.transfer import MemoryStorageConfig
from tailrace.errors import QueueError, TailraceError, UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes.added import add_unit, remove_unit
from tailrace.transfer.queue.processes.plan import QueuePlan
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tests.helpers.waiting import until
from tests.transfer.processes.test_supervisor import LIMIT_S, ends, kill, queue, stats
from tests.transfer.tables import group, orders, outputs, tokens

MEMORY = AddedUnitConfig(storage=MemoryStorageConfig())
COMMAND = (sys.executable, "-m", "tailrace", "queue")


def units(processes: QueueProcesses) -> dict[str, int]:
    """The rows of each unit that is alive."""
    return {unit.name: unit.rows for unit in stats(processes).units if unit.alive}


def many(first: int, groups: int) -> list[NewRow]:
    """Rows whose cells do not travel with their Admit."""
    return [row for number in range(first, first + groups) for row in group(number, prompt=2000)]


def test_an_added_unit_takes_rows_and_hands_them_on_before_it_leaves(tmp_path: Path) -> None:
    with queue(tmp_path) as processes, SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client:
        client.put(many(0, 1))
        with add_unit(processes.address, MEMORY, log=tmp_path / "added.log", name="added") as unit:
            for number in range(1, 6):
                client.put(many(number, 1))
            assert units(processes) == {"unit-0": 3, "added": 3}
            first = client.claim("rollout")
            client.ack(first, outputs(first, response_ids=tokens(7)))
        assert unit.has_left
        assert units(processes) == {"unit-0": 6}
        assert stats(processes).lost_groups == 0
        seen = orders(first)
        for _ in range(5):
            claim = client.claim("rollout")
            assert [len(row.cells["prompt_ids"]) for row in claim.rows] == [2000]  # type: ignore[arg-type]
            client.ack(claim, outputs(claim, response_ids=tokens(3)))
            seen += orders(claim)
        assert sorted(seen) == [100 * number for number in range(6)]
        assert sorted(len(client.claim("sink").rows[0].cells["response_ids"]) for _ in range(6)) == [3] * 5 + [7]  # type: ignore[arg-type]


def test_a_unit_of_the_queue_itself_leaves_and_is_not_started_again(tmp_path: Path) -> None:
    with queue(tmp_path, units=2) as processes, SyncQueue(processes.address, name="test") as client:
        client.put(many(0, 1))
        client.put(many(1, 1))
        pid = processes.pids["unit-0"]
        remove_unit(processes.address, "unit-0", limit_s=LIMIT_S)
        assert ends(pid)
        until(lambda: sorted(processes.pids) == ["controller", "unit-1"])
        assert units(processes) == {"unit-1": 2}
        kill(processes, "controller")
        until(lambda: units(processes) == {"unit-1": 2})
        with pytest.raises(UserError, match=r"^unit-1 is the last unit of the queue; add another one first$"):
            remove_unit(processes.address, "unit-1")
        with pytest.raises(UserError, match=r"^the queue has no unit 'unit-7'; its units are unit-1$"):
            remove_unit(processes.address, "unit-7")


def test_rows_are_copied_again_after_a_death_and_outlive_the_next_one(tmp_path: Path) -> None:
    with (
        queue(tmp_path, units=2, replicas=2) as processes,
        SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client,
    ):
        client.put(many(0, 40))
        claim = client.claim("rollout")
        client.ack(claim, outputs(claim, response_ids=tokens(5)))
        for latest, victim in enumerate(("unit-0", "unit-1", "unit-0"), start=2):
            kill(processes, victim)
            until(lambda latest=latest: {unit.number: unit.rows for unit in stats(processes).units}.get(latest) == 40)  # type: ignore[misc]
            assert stats(processes).lacking_rows == 0
        assert stats(processes).lost_groups == 0
        assert len(client.claim("sink").rows[0].cells["response_ids"]) == 5  # type: ignore[arg-type]


def test_another_unit_is_started_when_the_first_is_nearly_full_and_leaves_when_there_is_room(tmp_path: Path) -> None:
    room: dict[str, Any] = {"max_units": 2, "storage": {"type": "memory", "max_bytes": 2**20}}
    with (
        queue(tmp_path, **room) as processes,
        SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client,
    ):
        for number in range(16):  # of 100 kB each: ten fit into one unit
            client.put(group(number, prompt=12_500))
        assert units(processes).keys() == {"unit-0", "unit-1"}
        for _ in range(16):
            claim = client.claim("rollout")
            client.ack(claim, outputs(claim, response_ids=tokens(3)))
            claim = client.claim("sink")
            client.ack(claim, outputs(claim))
        until(lambda: sorted(processes.pids) == ["controller", "unit-0"])
        until(lambda: units(processes) == {"unit-0": 0})
    assert not (tmp_path / "units").read_text().count("unit-1")


def test_a_queue_goes_on_without_another_unit_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room: dict[str, Any] = {"max_units": 2, "storage": {"type": "memory", "max_bytes": 2**20}}
    settings = QueuePlan.settings

    def without_storage(self: QueuePlan, name: str) -> Any:
        known = settings(self, name)
        lost = '{"type": "arena", "directory": "/nowhere"}'
        return msgspec.structs.replace(known, storage=lost) if name == "unit-1" else known

    monkeypatch.setattr(QueuePlan, "settings", without_storage)
    with queue(tmp_path, **room) as processes, SyncQueue(processes.address, name="test") as client:
        for number in range(9):
            client.put(group(number, prompt=12_500))
        until(lambda: "the queue goes on without it, and tries again in 60 s" in caplog.text)
        assert sorted(processes.pids) == ["controller", "unit-0"]
        assert units(processes) == {"unit-0": 9}


def test_units_that_were_added_are_served_again(tmp_path: Path) -> None:
    room: dict[str, Any] = {"max_units": 2, "storage": {"type": "memory", "max_bytes": 2**20}}
    with queue(tmp_path, resume=True, **room) as processes:
        with SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client:
            for number in range(9):
                client.put(group(number, prompt=12_500))
        until(lambda: units(processes).keys() == {"unit-0", "unit-1"})
    with queue(tmp_path, resume=True, **room) as processes:
        assert {"unit-0", "unit-1"} <= processes.pids.keys()


def test_a_unit_whose_process_is_killed_is_dead_and_says_so(tmp_path: Path) -> None:
    with queue(tmp_path, unit_limit_s=1.0) as processes:
        with (
            pytest.raises(QueueError, match=r"^added of the queue ended \(SIGKILL, see .*added.log\)"),
            add_unit(processes.address, MEMORY, log=tmp_path / "added.log", name="added") as unit,
        ):
            os.kill(unit.pid, signal.SIGKILL)
        until(lambda: units(processes) == {"unit-0": 0})


def test_a_unit_that_is_ended_at_once_says_that_its_rows_are_lost(tmp_path: Path) -> None:
    with queue(tmp_path, unit_limit_s=1.0) as processes:
        with (
            pytest.raises(
                QueueError, match=r"^added was ended before it had left: rows that it alone had are to be put"
            ),
            add_unit(processes.address, MEMORY, log=tmp_path / "added.log", name="added") as unit,
        ):
            unit.end()
        assert ends(unit.pid)


def test_a_queue_that_is_served_again_has_the_units_of_its_configuration(tmp_path: Path) -> None:
    room: dict[str, Any] = {"storage": {"type": "memory", "max_bytes": 2**20}}
    with queue(tmp_path, resume=True, max_units=2, **room) as processes:
        with SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client:
            for number in range(9):
                client.put(group(number, prompt=12_500))
        until(lambda: units(processes).keys() == {"unit-0", "unit-1"})
    with queue(tmp_path, resume=True, units=4, **room) as processes:
        assert units(processes).keys() == {"unit-0", "unit-1", "unit-2", "unit-3"}


def test_a_mistake_is_one_line_and_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.transfer.queue.processes.added._ANSWER_LIMIT_S", 1.0)

    def refusal(address: QueueAddress, **changes: object) -> str:
        with pytest.raises(TailraceError) as caught, add_unit(address, log=tmp_path / "log", **changes):  # type: ignore[arg-type]
            pass
        assert not (tmp_path / "log").exists()
        return str(caught.value)

    with queue(tmp_path / "queue") as processes:
        address = processes.address
        assert refusal(address, name="unit-0") == "the queue has a unit 'unit-0' already; give another name"
        own = "the name 'unit-7' is for units that the queue starts itself; give another"
        assert refusal(address, name="unit-7") == own
        assert refusal(address, name="x" * 201).endswith("has 201 characters; give one of at most 200")
        assert "does not know the token" in refusal(msgspec.structs.replace(address, token=bytes(32)))
        wrong = AddedUnitConfig.model_validate({"storage": {"type": "arena", "directory": "/nowhere"}})
        assert refusal(address, config=wrong).startswith("storage.directory=/nowhere: ")
    assert refusal(address).startswith("no queue answers at ")
    with pytest.raises(UserError, match=r"^no queue answers at "):
        remove_unit(address, "unit-0")


def test_the_commands_add_and_remove_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tailrace(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=4 * LIMIT_S, check=False)

    monkeypatch.chdir(tmp_path)
    with queue(tmp_path / "queue") as processes:
        connection = str(processes.connection)
        command = [*COMMAND, "add-unit", connection, "storage.type=memory", "--name", "my own"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as added:
            assert added.stdout is not None
            assert added.stdout.readline() == "my own has joined the queue; its log: queue-unit.log\n"
            assert Path("queue-unit.log").is_file()
            printed = added.stdout.readline()
            assert f"tailrace queue remove-unit {connection} 'my own'" in printed
            done = tailrace(*shlex.split(printed.split("tailrace queue ")[1]))
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout == "my own has left the queue; its rows are on other units.\n"
            assert added.stdout.read() == done.stdout
            assert added.wait(LIMIT_S) == 0
        done = tailrace("remove-unit", connection, "unit-0")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "tailrace: unit-0 is the last unit of the queue; add another one first\n"
