"""The processes of a queue start together, come back when they are killed, and end with the one that started them."""

import asyncio
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import PeerLost, QueueError, TailraceError, UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.client.look import read_stats, read_table
from tailrace.transfer.queue.processes import supervisor as module
from tailrace.transfer.queue.processes import vitals
from tailrace.transfer.queue.processes.child import Child
from tailrace.transfer.queue.processes.plan import QueuePlan
from tailrace.transfer.queue.processes.serve import UnitSettings
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tailrace.transfer.socket_directory import directory_of
from tests.helpers.waiting import until

LIMIT_S = 30.0
TABLE = TableConfig(
    tasks=(
        TaskConfig(name="rollout", reads=("prompt_ids",), writes=("response_ids",)),
        TaskConfig(name="sink", reads=("response_ids",)),
    )
)


def queue(directory: Path, *, resume: bool = False, table: TableConfig = TABLE, **config: Any) -> QueueProcesses:
    values = {"units": 1, "storage": {"type": "memory"}, **config}
    return QueueProcesses(ServiceQueueConfig.model_validate(values), table, directory, resume=resume)


def stats(processes: QueueProcesses) -> QueueStats:
    return read_stats(processes.address, name="test", limit_s=LIMIT_S)


def ends(pid: int) -> bool:
    """Whether a process ends within the limit. A handle on it tells this even before it is reaped."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], LIMIT_S)[0])
    finally:
        os.close(handle)


def kill(processes: QueueProcesses, name: str) -> None:
    """Kill a process, and wait until another has its place."""
    killed = processes.pids[name]
    os.kill(killed, signal.SIGKILL)
    until(lambda: processes.pids[name] != killed)


def test_all_units_have_joined_when_the_block_begins_and_all_processes_are_gone_after_it(tmp_path: Path) -> None:
    with queue(tmp_path, units=2) as processes:
        pids = processes.pids
        assert sorted(pids) == ["controller", "unit-0", "unit-1"]
        assert sorted(unit.name for unit in stats(processes).units if unit.alive) == ["unit-0", "unit-1"]
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_queue_serves_its_table(tmp_path: Path) -> None:
    with queue(tmp_path) as processes:
        table = read_table(processes.address, name="test", limit_s=LIMIT_S)
        assert [(task.name, task.reads, task.writes) for task in table.tasks] == [
            ("rollout", ("prompt_ids",), ("response_ids",)),
            ("sink", ("response_ids",), ()),
        ]
        assert table.columns == TABLE.columns


async def test_it_can_be_entered_in_an_event_loop(tmp_path: Path) -> None:
    async with queue(tmp_path) as processes:
        assert stats(processes).rows == 0


def test_its_processes_may_have_as_many_descriptors_as_the_machine_lets_them(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        with queue(tmp_path) as processes:
            for pid in processes.pids.values():
                assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_its_address_is_in_a_file_that_others_cannot_read_and_on_no_command_line(tmp_path: Path) -> None:
    with queue(tmp_path) as processes:
        assert QueueAddress.read(processes.connection) == processes.address
        assert stat.S_IMODE(processes.connection.stat().st_mode) == 0o600
        for pid in processes.pids.values():
            assert processes.address.token not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_killed_controller_comes_back_where_it_was(tmp_path: Path) -> None:
    with queue(tmp_path) as processes:
        address = processes.address
        kill(processes, "controller")
        assert processes.address == address
        assert list(stats(processes).tasks) == ["rollout", "sink"]
        until(lambda: [unit.name for unit in stats(processes).units if unit.alive] == ["unit-0"])


@pytest.mark.parametrize("name", ["controller", "unit-0"])
def test_one_that_stands_still_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(vitals, "_SILENCE_LIMIT_S", 3.0)
    with queue(tmp_path) as processes:
        stopped = processes.pids[name]
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: processes.pids[name] != stopped)
        assert ends(stopped)
        until(lambda: [unit.name for unit in stats(processes).units if unit.alive] == ["unit-0"])
    assert "killed, since it had given no sign of life for 3 s" in "\n".join(log_of(tmp_path, name))


def test_a_killed_unit_comes_back_under_its_name(tmp_path: Path) -> None:
    def endpoints() -> list[list[str]]:
        return [unit.endpoints for unit in read_table(processes.address, name="test", limit_s=LIMIT_S).units]

    with queue(tmp_path) as processes:
        before = endpoints()
        kill(processes, "unit-0")
        until(lambda: endpoints() not in ([], before))
        until(lambda: [unit.name for unit in stats(processes).units if unit.alive] == ["unit-0"])


def test_a_queue_whose_processes_die_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "MAX_DEATHS", 1)
    with pytest.raises(QueueError, match=r"unit-0 of the queue ended \(SIGKILL.*\); with it, 2 of its processes"):
        _kill_twice(queue(tmp_path))


def _kill_twice(starting: QueueProcesses) -> None:
    with starting as processes:
        kill(processes, "controller")
        pids = processes.pids
        os.kill(pids["unit-0"], signal.SIGKILL)
        processes.wait()
        assert ends(pids["controller"])
        raise PeerLost("what a client sees of it, and what the error of the processes explains")


def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.transfer.processes.test_supervisor import queue\n"
        f"with queue(Path({str(tmp_path)!r})) as processes:\n"
        "    print(*processes.pids.values(), flush=True); sys.stdin.read()"
    )
    here = {**os.environ, "TMPDIR": str(tmp_path)}  # the place of sockets that a killed parent leaves behind
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert all(ends(pid) for pid in pids)


def test_a_queue_that_goes_on_is_where_it_was_and_a_new_one_is_not(tmp_path: Path) -> None:
    addresses = []
    for resume in (False, True, False):
        with queue(tmp_path, resume=resume) as processes:
            addresses.append(processes.address)
            assert stats(processes).rows == 0
    first, second, third = addresses
    assert second == first
    assert third.token != first.token


def test_a_directory_has_one_queue(tmp_path: Path) -> None:
    with queue(tmp_path) as processes:
        with pytest.raises(UserError, match="another process serves a queue"), queue(tmp_path):
            pass
        assert list(stats(processes).tasks) == ["rollout", "sink"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": {"type": "arena", "directory": "/nowhere"}}, "^queue.storage.directory=/nowhere: No such file"),
        ({"listen": "192.0.2.1"}, "^queue.listen=192.0.2.1: this machine cannot listen there"),
        (
            {"table": TableConfig(tasks=(TaskConfig(name="a", reads=("colour",)),))},
            "task 'a' reads 'colour', which is no column",
        ),
    ],
)
def test_what_a_process_cannot_serve_is_said_to_whoever_starts_it(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TailraceError, match=message), queue(tmp_path / "queue", **changes):
        pass
    assert not (tmp_path / "queue").exists(), "nothing is left"


def test_why_a_process_cannot_be_started_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "MAX_DEATHS", 1)
    monkeypatch.setattr(vitals, "_RESTART_PAUSE_S", 0.0)
    memory = tmp_path / "memory"
    memory.mkdir()
    starting = queue(tmp_path / "queue", storage={"type": "arena", "directory": str(memory)})
    with pytest.raises(QueueError, match=r"exit code 1.*: no directory for shared memory can be made.*given up"):
        _kill_without(memory, starting)


def _kill_without(memory: Path, starting: QueueProcesses) -> None:
    with starting as processes:
        shutil.rmtree(memory)
        os.kill(processes.pids["unit-0"], signal.SIGKILL)
        processes.wait()


def test_one_that_could_not_serve_is_started_again_after_a_pause_and_others_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(vitals, "_RESTART_PAUSE_S", LIMIT_S)
    with queue(tmp_path / "queue", storage={"type": "arena", "directory": str(memory)}) as processes:
        shutil.rmtree(memory)
        os.kill(processes.pids["unit-0"], signal.SIGKILL)
        until(lambda: "again in 30 s" in caplog.text)
        kill(processes, "controller")
        assert list(stats(processes).tasks) == ["rollout", "sink"]
    assert caplog.text.count("again now") == 2


def log_of(directory: Path, name: str) -> list[str]:
    """The lines of a log without the time, which has two words."""
    return [line.split(maxsplit=2)[2] for line in (directory / f"{name}.log").read_text().splitlines()]


def test_each_log_says_when_its_process_was_started_and_why_it_ended(tmp_path: Path) -> None:
    with queue(tmp_path) as processes:
        kill(processes, "unit-0")
        until(lambda: [unit.number for unit in stats(processes).units if unit.alive] == [1])
        killed = processes.pids["controller"]
        os.kill(killed, signal.SIGTERM)
        until(lambda: processes.pids["controller"] != killed)
        assert list(stats(processes).tasks) == ["rollout", "sink"]
    hung_up = "ends: its parent has hung up, or is gone"
    assert log_of(tmp_path, "unit-0") == [
        "unit-0 is started",
        "unit-0 ended (SIGKILL)",
        "unit-0 is started",
        f"unit-0 {hung_up}",
    ]
    assert log_of(tmp_path, "controller") == [
        "controller is started",
        "controller ends: SIGTERM",
        "controller is started",
        f"controller {hung_up}",
    ]


@pytest.mark.parametrize("harm", [Path.unlink, lambda journal: journal.write_bytes(b"")])
def test_a_controller_is_not_started_again_without_its_journal(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    starting = queue(tmp_path)
    with pytest.raises(QueueError, match=r"SIGKILL.*journal .*/journal was removed or emptied meanwhile.*given up"):
        _kill_after(starting, lambda: harm(tmp_path / "journal"))


def _kill_after(starting: QueueProcesses, harm: Callable[[], object]) -> None:
    with starting as processes:
        harm()
        os.kill(processes.pids["controller"], signal.SIGKILL)
        processes.wait()


def test_a_queue_whose_directory_was_removed_is_given_up_with_a_word(tmp_path: Path) -> None:
    starting = queue(tmp_path / "queue")
    with pytest.raises(QueueError, match=r"its journal .* was removed or emptied"):
        _kill_after(starting, lambda: shutil.rmtree(tmp_path / "queue"))


def test_why_the_journal_cannot_be_written_is_said_by_the_parent_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "MAX_DEATHS", 1)
    reason = r"the journal .*/journal cannot be written: File too large"
    with pytest.raises(QueueError, match=rf"controller of the queue ended \(exit code 1.*: {reason}.*given up"):
        _fill_journal(queue(tmp_path))
    assert re.fullmatch(rf"controller ended \(exit code 1\): {reason}", log_of(tmp_path, "controller")[-1])


def _fill_journal(starting: QueueProcesses) -> None:
    with starting as processes:
        resource.prlimit(processes.pids["controller"], resource.RLIMIT_FSIZE, (1, 1))
        os.kill(processes.pids["unit-0"], signal.SIGKILL)  # so that its successor changes the journal
        processes.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_start_that_fails_as_nobody_foresaw_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(QueuePlan, "_place", fail)
    with pytest.raises(QueueError, match="thread of the queue's processes has failed: a fault"), queue(tmp_path):
        pass


def test_a_process_that_says_what_is_no_message_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(Child, "_start", lambda _: ours)
    settings = UnitSettings(
        token=b"", endpoints=[], name="a", controller="", storage={}, storage_name="", join_every_s=1.0
    )
    with ours, theirs:
        child = Child("unit-0", settings, tmp_path / "log")
        theirs.sendall(b"a warning of some library\n")
        with pytest.raises(QueueError, match=r"unit-0 of the queue.*cannot be understood"):
            child.hear()
        ours.settimeout(0.01)
        theirs.sendall(b"{")
        with pytest.raises(QueueError, match=r"unit-0 of the queue.*cannot be understood: timed out"):
            child.hear()


def test_processes_that_have_not_ended_within_the_limit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end, may_end = QueueProcesses._end, threading.Event()

    def end_late(processes: QueueProcesses) -> None:
        assert may_end.wait(LIMIT_S)
        end(processes)

    monkeypatch.setattr(QueueProcesses, "_end", end_late)
    with queue(tmp_path) as processes:
        pid = processes.pids["unit-0"]
        for limit in ("_LOOK_LIMIT_S", "START_LIMIT_S", "_END_LIMIT_S", "KILLED_LIMIT_S"):
            monkeypatch.setattr(module, limit, 0.0)
    assert f"have not ended within 0 s: {processes.pids}" in caplog.text
    may_end.set()
    processes.wait()
    assert ends(pid)


def test_a_stop_during_the_start_ends_what_was_started(tmp_path: Path) -> None:
    processes = queue(tmp_path)
    processes.stop()
    with pytest.raises(QueueError, match="stopped while it started"), processes:
        pass
    assert [pid for pid in processes.pids.values() if not ends(pid)] == []


async def test_a_cancelled_start_has_ended_what_it_started(tmp_path: Path) -> None:
    processes = queue(tmp_path)
    start = asyncio.create_task(processes.__aenter__())
    while not (begun := processes.pids):
        await asyncio.sleep(0)
    sockets = directory_of(processes.address.endpoints)
    assert sockets is not None
    assert sockets.exists()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not sockets.exists()
    assert all(ends(pid) for pid in begun.values())


def test_what_killed_processes_have_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(module, "_END_LIMIT_S", 0.0)
    with queue(tmp_path / "queue", storage={"type": "arena", "directory": str(memory)}) as processes:
        assert len(list(memory.iterdir())) == 1
        os.kill(processes.pids["unit-0"], signal.SIGSTOP)
    assert not list(memory.iterdir())
    assert log_of(tmp_path / "queue", "unit-0")[-1].startswith("unit-0 ended (SIGKILL): killed, since it had not ended")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tailrace-")] == []
