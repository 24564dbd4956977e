"""What only Ray can show: places, deaths of keepers and drivers, and that nothing is left behind."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from tailrace.cluster import ray as ray_module
from tailrace.cluster.ray import RayCluster, RayConnection
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ConfigError, WorkerDied
from tests.cluster.conftest import CONFIG, servant
from tests.cluster.hearing import LIMIT_S, Hearing
from tests.cluster.test_process import gone

CORES = float(os.cpu_count() or 1)


async def test_too_many_workers_are_refused_before_any_is_started(ray_connection: None) -> None:
    pools = {"rollout": PoolConfig(workers=1000), "trainer": PoolConfig()}
    with pytest.raises(ConfigError, match=r"ask for 1001 CPU together \(rollout 1000, trainer 1\)"):
        async with RayCluster(CONFIG, pools):
            pass


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
    assert "rollout-1 waits for a place in the cluster, up to 60 s: it needs" in capsys.readouterr().err


async def test_a_worker_without_a_place_in_time_is_an_error(ray_connection: None) -> None:
    pool = PoolConfig(cpus=CORES)
    async with RayCluster(CONFIG, {"rollout": pool}) as cluster:
        await cluster.start(servant(pool=pool))
        hasty = RayCluster(ClusterConfig(start_limit_s=0.2), {"rollout": pool})
        with pytest.raises(ConfigError, match=r"rollout-1 was given no place within 0\.2 s: it needs \d+ CPU"):
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


async def test_a_stopped_keeper_is_killed(ray_connection: None) -> None:
    async with RayCluster(ClusterConfig(heartbeat_limit_s=3.0), {}) as cluster:
        handle = await cluster.start(servant())
        guard = psutil.Process(handle.pid).parent()
        async with Hearing(handle) as hearing:
            await hearing.until(lambda heard: heard.reports > 0)
            psutil.Process(handle.facts["keeper"]).suspend()
            with pytest.raises(WorkerDied, match="its keeper gave no sign of life for 3 s"):
                await hearing.end()
        await gone(handle.pid, guard.pid)


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


@asynccontextmanager
async def driver(end: str) -> AsyncIterator[Process]:
    """A driver as its own process group, like one that a shell started."""
    directory = tempfile.mkdtemp(dir="/tmp")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.cluster.driver", end),
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


async def started(process: Process) -> list[int]:
    """The pids of its worker, of what that started, and of all that is below the driver."""
    assert process.stdout is not None
    pids: list[int] = json.loads(await process.stdout.readline())
    return [*pids, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]


async def test_ctrl_c_leaves_the_workers_to_the_driver_which_leaves_nothing() -> None:
    async with driver("wait") as process:
        pids = await started(process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out.decode()) == (0, "3\n"), err.decode()
    assert err.decode() == "Stopping; once more to exit at once.\n"
    await gone(*pids)


async def test_an_error_of_the_driver_leaves_nothing() -> None:
    async with driver("error") as process:
        pids = await started(process)
        _, err = await process.communicate()
    assert err.decode().splitlines()[-1] == "tailrace.errors.ModelError: broken"
    await gone(*pids)


async def test_a_killed_driver_leaves_nothing() -> None:
    async with driver("wait") as process:
        pids = await started(process)
        process.kill()
        await gone(*pids)
