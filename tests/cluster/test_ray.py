"""What only Ray can show: placement, deaths of keepers and drivers, and that nothing is left behind."""

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import tomllib
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import grpc
import msgspec
import psutil
import pytest
import ray

from tailrace.cluster import connection
from tailrace.cluster import ray as ray_module
from tailrace.cluster.base import Answer, Report
from tailrace.cluster.connection import check_version
from tailrace.cluster.environment import ray_environment
from tailrace.cluster.ray import Keeper, RayCluster, RayHandle
from tailrace.cluster.ray_process import ray_directory
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterError, ConfigError, WorkerDied
from tests.cluster.conftest import CONFIG, POOL, servant
from tests.cluster.hearing import LIMIT_S, Hearing
from tests.cluster.test_process import gone
from tests.helpers.waiting import until

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
        assert pickle.loads(msgspec.msgpack.decode(ended, type=Answer).value) == []
    finally:
        await keeper.kill()


async def test_a_worker_waits_for_a_place_and_says_so(ray_connection: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_module, "_PLACED_SOON_S", 0.1)
    pool = PoolConfig(cpus=CORES)
    said: list[str] = []
    async with RayCluster(CONFIG, {"rollout": pool}) as cluster:
        first = await cluster.start(servant(pool=pool))
        second = asyncio.create_task(cluster.start(servant("rollout-1", pool=pool), said.append))
        await asyncio.wait([second], timeout=0.3)
        await first.close()
        assert await (await second).call("add", 1, 1) == 2
    (line,) = said
    assert "rollout-1 has not started yet, and is waited for, up to 60 s: its keeper starts slowly, or waits" in line


async def test_more_workers_than_ever_fit_are_refused_where_no_machine_can_join(ray_connection: None) -> None:
    pools = {"rollout": PoolConfig(workers=1000), "trainer": PoolConfig()}
    async with RayCluster(CONFIG, {}) as cluster:
        with pytest.raises(ConfigError, match=r"ask for 1001 CPU together \(rollout 1000, trainer 1\)"):
            await cluster.check_room(pools)
    async with RayCluster(ClusterConfig(address="auto"), {}) as joined:
        await joined.check_room(pools)


async def test_a_worker_without_a_place_in_time_is_an_error(ray_connection: None) -> None:
    pool = PoolConfig(cpus=CORES)
    async with RayCluster(CONFIG, {"rollout": pool}) as cluster:
        await cluster.start(servant(pool=pool))
        hasty = RayCluster(ClusterConfig(start_limit_s=0.2), {"rollout": pool})
        expected = r"rollout-1 was given no place within 0\.2 s: its keeper starts slowly, or waits for .*, \d+ CPU"
        with pytest.raises(ClusterError, match=expected):
            await hasty.start(servant("rollout-1", pool=pool))
        await hasty.close()


async def test_a_worker_has_its_place_in_its_datacentre_alone(
    ray_connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = (node["NodeID"] for node in ray.nodes())  # type: ignore[no-untyped-call]
    here, elsewhere = (POOL.model_copy(update={"datacentre": name}) for name in (node, "west"))
    with pytest.raises(ConfigError, match=r"cluster\.rollout\.datacentre is 'west', and no machine of the cluster"):
        async with RayCluster(CONFIG, {"rollout": elsewhere}):
            pass
    hasty = RayCluster(ClusterConfig(start_limit_s=0.2), {"rollout": elsewhere})
    with pytest.raises(ClusterError, match=r"rollout-0 was given no place .* nothing in the datacentre west; see"):
        await hasty.start(servant(pool=elsewhere))
    await hasty.close()
    monkeypatch.setattr(ray_module, "_DATACENTRE", "ray.io/node-id")  # a label that every node has
    async with RayCluster(CONFIG, {"rollout": here}) as cluster:
        assert (await cluster.start(servant(pool=here))).facts["datacentre"] == node


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

    disconnected: list[bool] = []
    cluster = RayCluster(CONFIG, {})
    cluster._handles, cluster._disconnect = [cast(RayHandle, Hanging())], lambda: disconnected.append(True)
    closing = asyncio.create_task(cluster.close())
    await asyncio.sleep(0)  # closing has begun
    closing.cancel()
    await asyncio.wait([closing], timeout=LIMIT_S)
    assert closing.cancelled()
    assert disconnected == [True]


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


SERVICES = {
    "gcs_server": ("JobInfoGcsService/GetAllJobInfo", "InternalKVGcsService/InternalKVPut"),
    "raylet": ("NodeManagerService/RequestWorkerLease", "ObjectManagerService/Push"),
    "ray::Keeper": ("CoreWorkerService/PushTask",),
}
"""The services of each process through which code is run, or what will be run is changed."""


def listening() -> list[tuple[str, str, int]]:
    """The process, address and port of every socket on which this process or a descendant listens."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return [
        (process.name(), at.laddr.ip.removeprefix("::ffff:"), at.laddr.port)
        for process in family
        for at in process.net_connections("inet")
        if at.status == psutil.CONN_LISTEN
    ]


async def test_a_ray_of_ones_own_listens_on_this_machine_alone(ray_cluster: RayCluster) -> None:
    await ray_cluster.start(servant())
    sockets = listening()
    assert {"gcs_server", "raylet", "ray::Keeper"} <= {process for process, _, _ in sockets}
    assert {address for _, address, _ in sockets} == {"127.0.0.1"}


@pytest.mark.parametrize("token", [None, "", "0" * 64])
async def test_nobody_runs_code_on_a_ray_of_ones_own_without_its_token(
    ray_cluster: RayCluster, token: str | None
) -> None:
    await ray_cluster.start(servant())
    headers = () if token is None else (("authorization", f"Bearer {token}"),)
    refused = {
        service
        for process, _, port in listening()
        for service in SERVICES.get(process, ())
        if answer(port, f"/ray.rpc.{service}", headers) == grpc.StatusCode.UNAUTHENTICATED
    }
    assert refused == {service for services in SERVICES.values() for service in services}


def answer(port: int, method: str, headers: Sequence[tuple[str, str]]) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=LIMIT_S, metadata=headers)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("mode", [None, "disabled", "token"])
def test_a_ray_of_ones_own_has_a_token_of_its_own_whatever_the_environment_says(mode: str | None) -> None:
    here = {} if mode is None else {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "known", "RAY_AUTH_TOKEN_PATH": "/else"}
    made = [ray_environment(here) for _ in range(2)]
    assert {environment["RAY_AUTH_MODE"] for environment in made} == {"token"}
    tokens = {environment["RAY_AUTH_TOKEN"] for environment in made}
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "2.50.1", "2.51.0rc1"])
def test_a_ray_without_tokens_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Ray {version} is installed, which lets in whoever")):
        check_version(version)


@pytest.mark.parametrize("version", ["2.52.0", "2.60.0", "2.100.0.dev0", "3.0.0.dev0"])
def test_a_ray_with_tokens_is_not_refused(version: str) -> None:
    check_version(version)


def test_the_package_asks_for_a_ray_with_tokens() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = next(one for one in project["dependencies"] if one.startswith("ray>="))
    assert asked.startswith("ray>=" + ".".join(map(str, connection._FIRST_WITH_TOKENS)))


@pytest.mark.parametrize("base", ["", "a-directory-whose-path-is-too-long-for-sockets"])
def test_nobody_else_enters_the_directory_of_ray(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as parent:
        (Path(parent) / base).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(Path(parent) / base))
        before = os.umask(0)
        try:
            directory = ray_directory()
        finally:
            os.umask(before)
        assert directory.parent.stat().st_mode & 0o777 == 0o700
        longest = directory / f"session_2026-01-01_00-00-00_000000_{2**22}" / "sockets" / "plasma_store"
        assert len(str(longest)) <= 103  # the limit of macOS; that of Linux is 107
        directory.parent.rmdir()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "'127.0.0.1:1' cannot be reached: .*; start Ray there"),
        ("somewhere", "'somewhere' must be host:port"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connection.connect(address, None)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_a_port_that_is_not_rays_is_refused_at_once(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers otherwise, hangs up without an answer, or does not answer at all."""
    monkeypatch.setattr(connection, "_REACH_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def serve() -> socket.socket:
            client, _ = server.accept()
            if answer is not None:
                with suppress(OSError):  # the client may have hung up already
                    client.sendall(answer)
                    client.shutdown(socket.SHUT_WR)
            return client

        serving = thread.submit(serve)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError) as caught:
            connection.connect(address, None)
        serving.result().close()
    assert str(caught.value) == (
        f"cluster.address '{address}' is not Ray's: who listens there answers otherwise; give the address that "
        "`ray start --head` has printed, its port 6379 by default"
    )


def test_a_running_ray_is_known_as_one(ray_connection: None) -> None:
    connection._check_reachable(ray.get_runtime_context().gcs_address)


@asynccontextmanager
async def driver(end: str) -> AsyncIterator[Process]:
    """Start a driver as its own process group, as a shell does."""
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
        await asyncio.to_thread(until_empty, Path(directory))
        os.rmdir(directory)


def until_empty(directory: Path) -> None:
    """Wait until the files of a killed driver are removed."""
    until(lambda: not os.listdir(directory), what=lambda: os.listdir(directory))


async def started(process: Process) -> tuple[list[int], list[Path]]:
    """Return all pids below the driver, those that it has printed included, and the directories that it has printed.

    Assert that no worker of Ray is idle.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    pids, directories = json.loads(await process.stdout.readline())
    assert all(Path(directory).exists() for directory in directories)
    pids += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    idle = ("ray::IDLE", "default_worker.py")  # an idle worker of Ray, or one that has just started
    assert not [part for pid in pids for part in command_of(pid) if part.strip().endswith(idle)]
    process.stdin.write(b"go on\n")
    await process.stdin.drain()
    return pids, [Path(directory) for directory in directories]


def command_of(pid: int) -> list[str]:
    """The words of a process's command; none where it has ended, as the short commands do that Ray runs."""
    with suppress(psutil.NoSuchProcess):  # psutil.ZombieProcess is one
        return list(psutil.Process(pid).cmdline())
    return []


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


def of_ray(pids: list[int], part: str) -> psutil.Process:
    """The one process among `pids` whose command contains `part`."""
    [found] = [pid for pid in pids if part in " ".join(command_of(pid))]
    return psutil.Process(found)


@pytest.mark.parametrize("part", ["raylet/raylet", "runtime_env"])
async def test_a_driver_whose_ray_has_ended_is_told_and_leaves_nothing(part: str) -> None:
    async with driver("lose") as process:
        pids, directories = await started(process)
        of_ray(pids, part).kill()
        out, err = await process.communicate()
        await nothing_left(pids, directories)
    said = out.decode().splitlines()
    assert process.returncode == 0, err.decode()
    assert said[0].startswith("the Ray that had the workers has ended: ")
    assert said[1:] == ["Report(events=(), lines=())"]


async def test_a_driver_does_not_wait_for_a_ray_that_stands_still_and_leaves_nothing() -> None:
    async with driver("close") as process:
        pids, directories = await started(process)
        of_ray(pids, "gcs_server").suspend()
        _, err = await process.communicate()
        await nothing_left(pids, directories)
    assert process.returncode == 0
    assert "Ray has not shut down within 1 s, and is killed with all that it has started" in err.decode()


async def test_a_killed_driver_leaves_nothing() -> None:
    async with driver("wait") as process:
        parts = await started(process)
        process.kill()
        await nothing_left(*parts)
