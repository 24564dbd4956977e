"""What only Ray can show: places, deaths of keepers and drivers, and that nothing is left behind."""

import asyncio
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import psutil
import pytest
import ray

from tailrace.cluster import ray as ray_module
from tailrace.cluster.base import Report
from tailrace.cluster.ray import Keeper, RayCluster, RayConnection, RayHandle
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterError, ConfigError, WorkerDied
from tests.cluster.conftest import CONFIG, servant
from tests.cluster.hearing import LIMIT_S, Hearing
from tests.cluster.test_process import gone

CORES = float(os.cpu_count() or 1)


async def test_too_many_workers_are_refused_before_any_is_started(ray_connection: None) -> None:
    pools = {"rollout": PoolConfig(workers=1000), "trainer": PoolConfig()}
    with pytest.raises(ConfigError, match=r"ask for 1001 CPU together \(rollout 1000, trainer 1\)"):
        async with RayCluster(CONFIG, pools):
            pass


async def test_a_cancellation_that_overtakes_its_call_leaves_it_undone() -> None:
    keeper = Keeper(servant(), os.getcwd(), CONFIG)
    _, error = await keeper.open("127.0.0.1", "")
    assert not error
    try:
        await keeper.cancel(7)
        async with asyncio.timeout(LIMIT_S):
            assert await keeper.call(7, "linger", pickle.dumps(("a",))) == (b"", b"")
            ended, _ = await keeper.call(8, "whose_ended", pickle.dumps(()))
        assert pickle.loads(ended) == []
    finally:
        await keeper.kill()


async def test_a_worker_waits_for_a_place_and_says_so(
    ray_connection: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_module, "_PLACED_SOON_S", 0.1)
    pool = PoolConfig(cpus=CORES)
    async with RayCluster(CONFIG, {"rollout": pool}) as cluster:
        first = await cluster.start(servant(pool=pool))
        second = asyncio.create_task(cluster.start(servant("rollout-1", pool=pool)))
        await asyncio.wait([second], timeout=0.3)
        await first.close()
        assert await (await second).call("add", 1, 1) == 2
    said = capsys.readouterr().err
    assert "rollout-1 has not started yet, and is waited for, up to 60 s: its keeper starts slowly, or waits" in said


async def test_a_worker_without_a_place_in_time_is_an_error(ray_connection: None) -> None:
    pool = PoolConfig(cpus=CORES)
    async with RayCluster(CONFIG, {"rollout": pool}) as cluster:
        await cluster.start(servant(pool=pool))
        hasty = RayCluster(ClusterConfig(start_limit_s=0.2), {"rollout": pool})
        expected = r"rollout-1 was given no place within 0\.2 s: its keeper starts slowly, or waits for .*, \d+ CPU"
        with pytest.raises(ClusterError, match=expected):
            await hasty.start(servant("rollout-1", pool=pool))
        await hasty.close()


async def test_a_killed_keeper_takes_its_worker_with_it(ray_cluster: RayCluster) -> None:
    handle = await ray_cluster.start(servant())
    child = await handle.call("start_child")
    guard = psutil.Process(handle.pid).parent()
    keeper = psutil.Process(handle.facts["keeper"])
    async with Hearing(handle) as hearing:
        await hearing.until(lambda heard: heard.reports > 0)
        keeper.kill()
        with pytest.raises(WorkerDied, match="its keeper on Ray died"):
            await hearing.end()
    await gone(handle.pid, child, guard.pid)


async def test_a_stopped_keeper_is_killed_whoever_waits_for_it(ray_connection: None) -> None:
    async with RayCluster(ClusterConfig(heartbeat_limit_s=3.0), {}) as cluster:
        handle = await cluster.start(servant())
        guard = psutil.Process(handle.pid).parent()
        async with Hearing(handle) as hearing:
            await hearing.until(lambda heard: heard.reports > 0)
            psutil.Process(handle.facts["keeper"]).suspend()
            call = asyncio.create_task(handle.call("add", 1, 1))
            for waiting in (call, hearing.ended):
                with pytest.raises(WorkerDied, match="its keeper gave no sign of life for 3 s"):
                    await asyncio.wait_for(waiting, LIMIT_S)
        await gone(handle.pid, guard.pid)


async def test_a_stopped_keeper_is_killed_when_nobody_reads_reports(ray_connection: None) -> None:
    async with RayCluster(ClusterConfig(heartbeat_limit_s=3.0), {}) as cluster:
        handle = await cluster.start(servant())
        psutil.Process(handle.facts["keeper"]).suspend()
        with pytest.raises(WorkerDied, match="its keeper gave no sign of life for 3 s"):
            await asyncio.wait_for(handle.call("add", 1, 1), LIMIT_S)


async def test_a_stopped_keeper_is_waited_for_no_longer_than_the_close_may_take(
    ray_connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RayCluster(CONFIG, {}) as cluster:
        handle = await cluster.start(servant())
        psutil.Process(handle.facts["keeper"]).suspend()
        for name in ("CLOSE_LIMIT_S", "_KILL_LIMIT_S"):
            monkeypatch.setattr(ray_module, name, 0.1)
        monkeypatch.setattr(ray_module, "CANCEL_LIMIT_S", None)
        async with asyncio.timeout(LIMIT_S):
            assert await handle.close() == Report()
        await gone(handle.pid)


async def test_a_close_that_is_cancelled_disconnects_all_the_same() -> None:
    class Hanging:
        async def kill(self) -> None:
            await asyncio.Event().wait()

    class Connection:
        is_open = True

        def close(self) -> None:
            self.is_open = False

    cluster = RayCluster(CONFIG, {})
    connection = Connection()
    cluster._handles, cluster._connection = [cast(RayHandle, Hanging())], cast(RayConnection, connection)
    closing = asyncio.create_task(cluster.close())
    await asyncio.sleep(0)  # it has begun
    closing.cancel()
    await asyncio.wait([closing], timeout=LIMIT_S)
    assert closing.cancelled()
    assert not connection.is_open


async def test_a_process_that_is_connected_joins_no_other_cluster(ray_connection: None) -> None:
    with pytest.raises(
        ConfigError, match=r"'10\.0\.0\.1:6379', and this process is connected to the Ray at .* already"
    ):
        async with RayCluster(ClusterConfig(address="10.0.0.1:6379"), {}):
            pass


async def test_a_process_that_is_connected_to_several_machines_says_that_it_means_them(
    ray_connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 1.0}}] * 2
    monkeypatch.setattr("tailrace.cluster.ray._nodes", lambda: nodes)
    with pytest.raises(ConfigError, match=r"connected to a Ray of 2 machines, .* give cluster\.address=auto"):
        async with RayCluster(ClusterConfig(), {}):
            pass
    async with RayCluster(ClusterConfig(address="auto"), {}):
        pass


def test_a_run_s_ray_leaves_the_environment_as_it_was_and_the_driver_its_own_end() -> None:
    """In a process of its own: this one shares a Ray among its tests. A second Ray starts as the first did, and has not
    been closed when the driver ends.
    """
    code = (
        "import os, ray; from tailrace.cluster.ray import RayConnection; before = dict(os.environ)\n"
        "for is_closed in (True, False):\n"
        "    connection = RayConnection(None); connection.open()\n"
        "    assert 'TAILRACE_RAY' not in os.environ\n"
        "    assert ray.get(ray.remote(lambda: 'TAILRACE_RAY' in __import__('os').environ).remote())\n"
        "    if is_closed:\n"
        "        connection.close()\n"
        "        added = os.environ.keys() - before.keys() - {'PYTHONBREAKPOINT', 'RAY_AUTH_MODE'}  # Ray's own\n"
        "        assert not added, added\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "'127.0.0.1:1' cannot be reached: .*; start Ray there"),
        ("somewhere", "'somewhere' must be host:port"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayConnection(address).open()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_a_port_that_is_not_rays_is_refused_at_once(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of another kind, of nothing before it hangs up, or none at all."""
    monkeypatch.setattr(ray_module, "_REACH_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def serve() -> socket.socket:
            connection, _ = server.accept()
            if answer is not None:
                with suppress(OSError):  # whoever has seen enough may have hung up
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
            return connection

        serving = thread.submit(serve)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError) as caught:
            RayConnection(address).open()
        serving.result().close()
    assert str(caught.value) == (
        f"cluster.address '{address}' is not Ray's: who listens there answers otherwise; give the address that "
        "`ray start --head` has printed, its port 6379 by default"
    )


def test_a_running_ray_is_known_as_one(ray_connection: None) -> None:
    ray_module._check_reachable(ray.get_runtime_context().gcs_address)


@asynccontextmanager
async def driver(end: str) -> AsyncIterator[Process]:
    """A driver as its own process group, like one that a shell started."""
    directory = tempfile.mkdtemp(dir="/tmp")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.cluster.driver", end),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
        env=os.environ | {"TMPDIR": directory},
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        shutil.rmtree(directory)


async def started(process: Process) -> tuple[list[int], list[Path]]:
    """The pids of its worker, of what that started, and of all that is below the driver, where nothing is idle; what it
    has outside memory.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    pids, directories = json.loads(await process.stdout.readline())
    assert all(Path(directory).exists() for directory in directories)
    children = psutil.Process(process.pid).children(recursive=True)
    pids += [child.pid for child in children]
    idle = ("ray::IDLE", "default_worker.py")  # a worker of Ray for which there is no work, or that has just begun
    assert not [part for child in children for part in child.cmdline() if part.strip().endswith(idle)]
    process.stdin.write(b"go on\n")
    await process.stdin.drain()
    return pids, [Path(directory) for directory in directories]


async def nothing_left(pids: list[int], directories: list[Path]) -> None:
    await gone(*pids)
    assert not [directory for directory in directories if directory.exists()]


async def test_ctrl_c_leaves_the_workers_to_the_driver_which_leaves_nothing() -> None:
    async with driver("wait") as process:
        parts = await started(process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out.decode()) == (0, "3\n"), err.decode()
    said = [line for line in err.decode().splitlines() if " has not started yet, and is waited for" not in line]
    assert said == ["Stopping; once more to exit at once."]
    await nothing_left(*parts)


async def test_an_error_of_the_driver_leaves_nothing() -> None:
    async with driver("error") as process:
        parts = await started(process)
        _, err = await process.communicate()
    assert err.decode().splitlines()[-1] == "tailrace.errors.ModelError: broken"
    await nothing_left(*parts)


async def test_a_worker_whose_ray_is_gone_is_closed_without_another_ray() -> None:
    async with driver("disconnect") as process:
        parts = await started(process)
        out, err = await process.communicate()
    assert (process.returncode, out.decode()) == (0, "False\n"), err.decode()
    await nothing_left(*parts)


async def test_a_killed_driver_leaves_nothing() -> None:
    async with driver("wait") as process:
        parts = await started(process)
        process.kill()
        await nothing_left(*parts)
