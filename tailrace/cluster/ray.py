"""Workers on Ray.

    driver: RayHandle ──Ray──▶ Keeper, an actor with the worker's resources ──▶ WorkerProcess ──▶ the worker

Ray places keepers and carries what is said; each keeper has one worker process (tailrace/cluster/process.py). A
worker that dies is told of by its keeper. A keeper that dies, with its machine or else, takes its worker with it, and
is told of by Ray; one that is silent for `heartbeat_limit_s` is killed. A Ray that was started for the run ends with
its driver, even if that is killed; then each worker's guard sees its keeper gone.
"""

import asyncio
import logging
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from asyncio import Future
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar, cast

import ray
from ray.exceptions import RayError

from tailrace.cluster.base import CANCEL_LIMIT_S, CLOSE_LIMIT_S, Cluster, Report, WorkerHandle, WorkerSpec
from tailrace.cluster.process import WorkerProcess
from tailrace.cluster.room import asked, check_room, described
from tailrace.cluster.undertaker import start as start_undertaker
from tailrace.cluster.wire import unpack_error
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ConfigError, TailraceError, WorkerDied, one_line
from tailrace.events import Event

Result = TypeVar("Result")

_STORE_BYTES = 80 * 2**20
"""Of a local Ray's object store, the least that it takes: nothing large goes through Ray."""
_MAX_BASE_CHARS = 24
"""Of the directory for temporary files: below it are Ray's sockets, whose paths may have 107."""
_REACH_LIMIT_S = 5.0
"""For a cluster to answer at all."""
_PLACED_SOON_S = 5.0
"""A worker that is not placed by then is said to wait for a place."""
_KILL_LIMIT_S = 15.0
"""For a keeper to kill its worker, before it is killed itself."""
_TURNS = 10
"""Silence is counted in so many parts, so that a driver that was held up does not blame a worker."""


class Keeper:
    """The actor that has one worker. What the worker raises is returned, pickled: a call's (value, error)."""

    def __init__(self, spec: WorkerSpec, directory: str, config: ClusterConfig) -> None:
        self._spec, self._directory, self._config = spec, directory, config
        self._worker: WorkerProcess | None = None

    async def place(self) -> dict[str, Any]:
        """Where it is."""
        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return {"host": socket.gethostname(), "address": address, "node": node, "keeper": os.getpid()}

    async def open(self, address: str, datacentre: str) -> tuple[bytes, bytes]:
        """Start the worker; the facts about it."""
        try:
            self._worker, facts = await WorkerProcess.start(
                self._spec,
                directory=self._directory,
                address=address,
                datacentre=datacentre,
                start_limit_s=self._config.start_limit_s,
                heartbeat_limit_s=self._config.heartbeat_limit_s,
            )
        except TailraceError as error:
            return b"", pickle.dumps(error)
        return facts, b""

    async def reports(self) -> AsyncGenerator[Report | bytes, None]:
        """The worker's reports, and last the error that ended it, if one did."""
        assert self._worker is not None
        try:
            async for report in self._worker.reports():
                yield report
        except TailraceError as error:
            yield pickle.dumps(error)

    async def call(self, method: str, args: bytes) -> tuple[bytes, bytes]:
        """What a command of the worker returns."""
        assert self._worker is not None
        try:
            return await self._worker.call(method, args), b""
        except TailraceError as error:
            return b"", pickle.dumps(error)

    async def close(self) -> tuple[bytes, bytes]:
        """Close the worker; its last events."""
        try:
            events = () if self._worker is None else await self._worker.close()
        except TailraceError as error:
            return b"", pickle.dumps(error)
        return pickle.dumps(events), b""

    async def kill(self) -> tuple[bytes, bytes]:
        """Kill the worker."""
        if self._worker is not None:
            await self._worker.kill()
        return b"", b""


class RayHandle(WorkerHandle):
    """A worker behind a keeper."""

    def __init__(self, spec: WorkerSpec, config: ClusterConfig) -> None:
        self.name = spec.name
        self.pid = 0
        self.facts = {}
        self._spec, self._config = spec, config
        resources = spec.pool.resources
        options = {"num_cpus": spec.pool.cpus, "num_gpus": spec.pool.gpus, "resources": resources, "max_restarts": 0}
        self._keeper: Any = ray.remote(Keeper).options(**options).remote(spec, os.getcwd(), config)
        self._has_place = False
        self._ended = ""
        """How the keeper was ended, where it was."""

    async def open(self) -> None:
        """Wait for a place, and for the worker to open there."""
        place = await self._placed()
        labels = {node["NodeID"]: node.get("Labels", {}) for node in _nodes()}
        datacentre = labels.get(place["node"], {}).get("datacentre", "")
        facts = pickle.loads(await self._answer(self._keeper.open.remote(place["address"], datacentre)))
        self.pid = facts["pid"]
        self.facts = facts | place | {"datacentre": datacentre}

    async def _placed(self) -> dict[str, Any]:
        placed = asyncio.ensure_future(_result(self._keeper.place.remote()))
        limit_s, what = self._config.start_limit_s, described(asked(self._spec.pool))
        try:
            await asyncio.wait([placed], timeout=min(_PLACED_SOON_S, limit_s))
            if not placed.done() and limit_s > _PLACED_SOON_S:
                message = f"{self.name} waits for a place in the cluster, up to {limit_s:g} s: it needs {what}"
                print(message, file=sys.stderr)
                await asyncio.wait([placed], timeout=limit_s - _PLACED_SOON_S)
            if not placed.done():
                raise ConfigError(
                    f"{self.name} was given no place within {limit_s:g} s: it needs {what}, and that is in use; wait "
                    "for it to be free, raise cluster.start_limit_s, or use fewer workers"
                )
            place: dict[str, Any] = placed.result()
            self._has_place = True
            return place
        except RayError as error:
            raise self._obituary(error) from error
        finally:
            placed.cancel()

    async def reports(self) -> AsyncGenerator[Report, None]:
        stream = self._keeper.reports.remote()
        try:
            while isinstance(item := await self._next(stream), Report):
                yield item
        except StopAsyncIteration:
            return
        finally:
            ray.cancel(stream)  # nobody reads any more
        raise unpack_error(item)

    async def _next(self, stream: Any) -> Report | bytes:
        coming: Future[Report | bytes] = asyncio.ensure_future(_next(stream))
        try:
            for _ in range(_TURNS):
                await asyncio.wait([coming], timeout=self._config.heartbeat_limit_s / _TURNS)
                if coming.done():
                    return coming.result()
        except RayError as error:
            raise self._obituary(error) from error
        finally:
            coming.cancel()
        self._ended = f"killed, since its keeper gave no sign of life for {self._config.heartbeat_limit_s:g} s"
        ray.kill(self._keeper)
        raise self._obituary(None)

    async def call(self, method: str, *args: Any) -> Any:
        return pickle.loads(await self._answer(self._keeper.call.remote(method, pickle.dumps(args))))

    async def _answer(self, ref: Any) -> bytes:
        """The value that a keeper's method returns; what is cancelled here is cancelled there."""
        answer = asyncio.ensure_future(_result(ref))
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            answer.add_done_callback(_known)  # the cancellation
            ray.cancel(ref)
            await asyncio.wait([answer], timeout=CANCEL_LIMIT_S)
            raise
        try:
            value, error = answer.result()
        except RayError as failure:
            raise self._obituary(failure) from failure
        if error:
            raise unpack_error(error)
        return cast(bytes, value)

    def _obituary(self, error: RayError | None) -> WorkerDied:
        return WorkerDied.of(self.name, self.pid, self._ended or f"its keeper on Ray died: {_told(error)}")

    async def close(self) -> tuple[Event, ...]:
        answer = await self._end("it was closed", self._keeper.close, CLOSE_LIMIT_S + _KILL_LIMIT_S)
        return pickle.loads(answer) if answer else ()

    async def kill(self) -> None:
        await self._end("killed", self._keeper.kill, _KILL_LIMIT_S)

    async def _end(self, how: str, method: Any, limit_s: float) -> bytes:
        """Let the keeper end its worker, then end the keeper; what it answers, if it can."""
        if self._ended:
            return b""
        self._ended = how
        try:
            with suppress(TimeoutError, WorkerDied):
                async with asyncio.timeout(limit_s if self._has_place else 0.0):  # without one it has no worker
                    return await self._answer(method.remote())
        finally:
            ray.kill(self._keeper)
        return b""


class RayCluster(Cluster):
    """Starts workers on Ray: on a cluster that it joins, or a Ray of its own on this machine.

    A process that is connected to Ray already stays so: then that is the cluster.
    """

    def __init__(self, config: ClusterConfig, pools: Mapping[str, PoolConfig]) -> None:
        """`pools`: by their names in `config`, all that will be started here."""
        self._config = config
        self._pools = pools
        self._handles: list[RayHandle] = []
        # The kernel ends the processes of a local Ray with the thread that started them: it must live as long.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._connection: RayConnection | None = None

    async def __aenter__(self) -> Self:
        try:
            if not ray.is_initialized():
                self._connection = RayConnection(self._config.address)
                await self._in_thread(self._connection.open)
            check_room(self._pools, [node["Resources"] for node in _nodes() if node["Alive"]])
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def address(self) -> str:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    async def start(self, spec: WorkerSpec) -> RayHandle:
        handle = RayHandle(spec, self._config)
        self._handles.append(handle)
        try:
            await handle.open()
        except BaseException:
            await handle.kill()
            raise
        return handle

    async def close(self) -> None:
        await asyncio.gather(*(handle.kill() for handle in self._handles))
        self._handles.clear()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self._in_thread(connection.close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class RayConnection:
    """This process's connection to Ray, and the Ray that was started for it."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._directory = ""
        self._undertaker: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """
        Raises:
            ConfigError: the cluster cannot be joined.
        """
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address is None:
            base = tempfile.gettempdir()
            self._directory = tempfile.mkdtemp(
                prefix="tailrace-ray-", dir=base if len(base) <= _MAX_BASE_CHARS else "/tmp"
            )
            self._undertaker = start_undertaker(secrets.token_hex(16), self._directory)
            os.environ.setdefault(
                "RAY_AUTH_TOKEN", secrets.token_hex(32)
            )  # or Ray would leave one in the home directory
            # Ray would kill keepers where memory runs low: they have little, and their workers would go with them.
            os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
            # address="local": RAY_ADDRESS is for those who ask for it
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _temp_dir=self._directory,
                **quiet,
            )
            return
        _check_reachable(self._address)
        try:
            ray.init(self._address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"cluster.address {self._address!r} cannot be joined: {one_line(error)}; leave it out to start a "
                "Ray for the run"
            ) from error

    def close(self) -> None:
        """Disconnect, and end what was started. Twice is harmless."""
        ray.shutdown()
        if self._undertaker is not None:
            undertaker, self._undertaker = self._undertaker, None
            undertaker.communicate(b"1", timeout=_KILL_LIMIT_S)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Ray itself takes a minute to say that nobody is there."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address {address!r} must be host:port of a running Ray cluster, or `auto`")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_LIMIT_S).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address {address!r} cannot be reached: {error}; start Ray there with `ray start --head`, or "
            "leave it out to start a Ray for the run"
        ) from None


async def _result(ref: Any) -> Any:
    return await ref


def _known(answer: Future[Any]) -> None:
    """Nobody wants to hear of it."""
    if not answer.cancelled():
        answer.exception()


async def _next(stream: Any) -> Any:
    return await (await anext(stream))


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _told(error: RayError | None) -> str:
    """Of what Ray says, the line that gives the reason."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in reversed(lines) if "died because" in line), lines[0])
