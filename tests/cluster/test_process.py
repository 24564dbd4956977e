"""One worker process on this machine, without Ray."""

import asyncio
import os
import pickle
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.cluster.base import WorkerSpec
from tailrace.cluster.environment import worker_environment
from tailrace.cluster.process import WorkerProcess
from tailrace.config.cluster import PoolConfig
from tailrace.errors import ConfigError, WorkerDied, WorkerError
from tests.cluster.conftest import servant
from tests.cluster.hearing import LIMIT_S, Hearing


@asynccontextmanager
async def started(
    spec: WorkerSpec, *, start_s: float = 60.0, heartbeat_s: float = 20.0
) -> AsyncIterator[WorkerProcess]:
    """Start a worker, and kill it at the end with all that it has started."""
    worker, _ = await WorkerProcess.start(
        spec,
        environment=worker_environment(os.environ, spec.pool),
        address="127.0.0.1",
        datacentre="",
        directory=os.getcwd(),
        start_limit_s=start_s,
        heartbeat_limit_s=heartbeat_s,
    )
    try:
        yield worker
    finally:
        await worker.kill()


async def call(worker: WorkerProcess, method: str, *args: Any) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return pickle.loads((await worker.call(method, pickle.dumps(args))).value)


async def gone(*pids: int) -> None:
    """Wait until these processes have ended, whether or not they are reaped."""
    for pid in pids:
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            with os.fdopen(ended):
                ready, _, _ = await asyncio.to_thread(select.select, [ended], [], [], LIMIT_S)
                assert ready, f"process {pid} is still there"


async def test_what_is_printed_arrives_line_by_line_from_python_from_c_and_from_children() -> None:
    async with started(servant()) as worker, Hearing(worker) as hearing:
        await call(worker, "say", "one\ntwo")
        await call(worker, "say_otherwise", "three")
        await hearing.until(lambda heard: len(heard.lines) == 4)
    assert hearing.lines == ["one", "two", "C: three", "child: three"]


async def test_events_that_come_while_the_reader_has_a_report_are_in_the_next() -> None:
    heard: list[str] = []
    async with started(servant()) as worker, aclosing(worker.reports()) as reports:
        await call(worker, "tell", "a")
        async for report in reports:
            if not heard:
                await call(worker, "stop")
                await call(worker, "run_has_ended")
            heard += [event.task for event in report.events]
    assert heard == ["a", "last"]


async def test_what_is_printed_after_the_last_report_comes_with_the_close() -> None:
    async with started(servant()) as worker, Hearing(worker) as hearing:
        await call(worker, "stop")
        await hearing.end()
        await call(worker, "say", "saved")
        assert (await worker.close()).lines == ("saved",)


async def test_a_worker_that_does_not_close_in_time_is_killed_and_its_last_words_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.cluster.process.CLOSE_LIMIT_S", 3.0)
    async with started(servant(kind="Stuck")) as worker:
        async with asyncio.timeout(20.0):  # less than the limit of a cancellation
            assert (await worker.close()).lines == ("closing",)
        await gone(worker.pid)


async def test_a_worker_that_closes_need_not_beat(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDWR), "wb", buffering=0) as pipe:
        async with started(replace(servant(kind="Slow"), settings=bytes(path)), heartbeat_s=2.0) as worker:
            closing = asyncio.create_task(worker.close())
            assert worker._watching is not None
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait([worker._watching])  # it was silent for too long, or is no longer watched
                pipe.write(b"1")
                assert (await closing).lines == ("closed",)


async def test_a_progress_bar_is_one_line() -> None:
    async with started(servant()) as worker, Hearing(worker) as hearing:
        await call(worker, "say", "1 %\r50 %\r100 %\r")
        await hearing.until(lambda heard: bool(heard.lines))
    assert hearing.lines == ["100 %"]


@pytest.mark.parametrize(
    ("code", "how"),
    [(7, "exit code 7"), (-signal.SIGKILL, "SIGKILL, out of memory?"), (-signal.SIGSEGV, "SIGSEGV")],
)
async def test_a_death_is_told_with_how_and_the_last_words(code: int, how: str) -> None:
    async with started(servant()) as worker, Hearing(worker) as hearing:
        expected = re.escape(f"worker rollout-0 (process {worker.pid}) died: {how}; its last output: last words")
        with pytest.raises(WorkerDied, match=expected):
            await call(worker, "die", code)
        with pytest.raises(WorkerDied, match=expected):
            await hearing.end()
        with pytest.raises(WorkerDied, match=expected):
            await call(worker, "add", 1, 1)
    assert hearing.lines == ["last words"]


async def test_a_worker_that_dies_while_it_opens_is_told_of_with_its_last_words() -> None:
    with pytest.raises(WorkerDied, match="exit code 3; its last output: no memory left"):
        async with started(servant(kind="Fragile")):
            pass


async def test_a_worker_that_does_not_open_in_time_is_killed() -> None:
    with pytest.raises(WorkerDied, match=r"killed, since it had not opened within 0\.5 s"):
        async with started(servant(kind="Endless"), start_s=0.5):
            pass


async def test_a_worker_whose_guard_does_not_start_in_time_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr("tailrace.cluster.process._GUARD_LIMIT_S", 0.1)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerDied, match=r"rollout-0 .*its guard had not started within 0\.1 s"):
        async with started(servant()):
            pass
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_stopped_process_is_killed() -> None:
    async with started(servant(), heartbeat_s=2.0) as worker, Hearing(worker) as hearing:
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="killed, since it had given no sign of life for 2 s"):
            await hearing.end()
        await gone(worker.pid)


@pytest.mark.parametrize("worker_lives", [True, False])
async def test_a_worker_whose_guard_is_stopped_is_dead_soon_after_it_is_silent(
    worker_lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.cluster.process._END_LIMIT_S", 1.0)
    async with started(servant(), heartbeat_s=2.0) as worker, Hearing(worker) as hearing:
        child = await call(worker, "start_child")
        guard = psutil.Process(worker.pid).parent()
        guard.suspend()
        os.kill(worker.pid, signal.SIGSTOP if worker_lives else signal.SIGKILL)
        with pytest.raises(WorkerDied, match="killed, since it had given no sign of life for 2 s"):
            await hearing.end()
        await gone(worker.pid, guard.pid, child)


async def test_a_worker_whose_event_loop_stands_still_is_killed() -> None:
    async with started(servant(), heartbeat_s=2.0) as worker:
        with pytest.raises(WorkerDied, match="no sign of life"):
            await call(worker, "stand_still")


async def test_a_call_whose_events_cannot_be_sent_fails_of_that() -> None:
    async with started(servant()) as worker:
        with pytest.raises(WorkerError, match="rollout-0: TypeError: Encoding objects of type object is unsupported"):
            await call(worker, "babble", True)
        assert await call(worker, "add", 1, 1) == 2


async def test_a_worker_that_cannot_beat_any_more_ends_and_says_why() -> None:
    async with started(servant()) as worker:
        with pytest.raises(WorkerDied, match="exit code 1; its last output: TypeError: Encoding objects of type obj"):
            await call(worker, "babble", False)


async def test_a_call_and_its_cancellation_that_come_together_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.cluster.process.CANCEL_LIMIT_S", None)  # only the answer can end the wait
    async with started(servant()) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        lingering = asyncio.create_task(worker.call("linger", pickle.dumps(("a",))))
        await asyncio.sleep(0)  # the call is sent
        lingering.cancel()
        await asyncio.sleep(0)  # the cancellation is sent, too
        os.kill(worker.pid, signal.SIGCONT)
        done, _ = await asyncio.wait([lingering], timeout=LIMIT_S)
        assert done == {lingering}
        assert lingering.cancelled()
        assert await call(worker, "add", 1, 1) == 2


@pytest.mark.parametrize("ending", ["kill", "die", "close", "guard"])
async def test_what_a_worker_started_ends_with_it(ending: str) -> None:
    async with started(servant()) as worker:
        child = await call(worker, "start_child")
        assert psutil.pid_exists(child)
        match ending:
            case "kill":
                await worker.kill()
            case "close":
                await worker.close()
            case "die":
                with pytest.raises(WorkerDied):
                    await call(worker, "die", -signal.SIGKILL)
            case "guard":
                # as when the keeper is killed: nothing holds the lifeline any more
                worker._child.lifeline[1].transport.abort()
        await gone(child, worker.pid)


@pytest.mark.parametrize("kill", ["descendants.kill_descendants()", "process._kill_group(os.getpgid(refused.pid))"])
def test_a_child_that_may_not_be_killed_keeps_none_of_the_others_alive(kill: str) -> None:
    """The kernel refuses to kill another user's process; here a stand-in for `os.kill` refuses."""
    code = (
        "import os, subprocess; from tailrace.host import descendants; from tailrace.cluster import process\n"
        "descendants.KILL_LIMIT_S = 0.2\n"
        "refused = subprocess.Popen(['sleep', '600'], process_group=0)\n"
        "other = subprocess.Popen(['sleep', '600'], process_group=refused.pid)\n"
        "kill = os.kill\n"
        "def refuse(pid, number):\n"
        "    if pid == refused.pid: raise PermissionError\n"
        "    kill(pid, number)\n"
        "os.kill = refuse\n"
        f"try: {kill}; other.wait(20)\n"
        "finally: os.killpg(refused.pid, 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def test_ctrl_c_does_not_reach_a_worker() -> None:
    async with started(servant()) as worker:
        assert os.getpgid(worker.pid) != os.getpgid(0)
        assert os.getsid(worker.pid) != os.getsid(0)


async def test_a_worker_runs_on_its_cores_with_its_threads() -> None:
    core = max(os.sched_getaffinity(0))
    pool = PoolConfig(cpus=0.0, cores=(core,), threads=3)
    async with started(servant(pool=pool)) as worker:
        assert os.sched_getaffinity(worker.pid) == {core}
        for thread in psutil.Process(worker.pid).threads():
            assert os.sched_getaffinity(thread.id) == {core}
        assert await call(worker, "environment", "OMP_NUM_THREADS") == "3"


@pytest.mark.parametrize(("gpus", "seen"), [(0.0, ""), (1.0, "3")])
async def test_a_worker_without_gpus_sees_none(monkeypatch: pytest.MonkeyPatch, gpus: float, seen: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    async with started(servant(pool=PoolConfig(cpus=0.0, gpus=gpus))) as worker:
        assert await call(worker, "environment", "CUDA_VISIBLE_DEVICES") == seen


async def test_cores_that_are_not_there_are_refused() -> None:
    pool = PoolConfig(cpus=0.0, cores=(0, 1000))
    with pytest.raises(ConfigError, match=r"cores \[1000\] cannot be had on .*; change `cores`"):
        async with started(servant(pool=pool)):
            pass
