"""Workers on Ray.

    driver: RayHandle ──Ray──▶ Keeper, an actor with the worker's resources ──▶ WorkerProcess ──▶ the worker

Ray places keepers and carries what is said; each keeper has one worker process (tailrace/cluster/process.py). A
worker that dies is told of by its keeper. A keeper that dies, with its machine or else, takes its worker with it, and
is told of by Ray; one that does not answer a ping for `heartbeat_limit_s` is killed. A Ray that was started for the
run ends with its driver, even if that is killed; then each worker's guard sees its keeper gone.
"""

import asyncio
import itertools
import logging
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from asyncio import Future, Task
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar, cast

import ray
from ray.exceptions import RayError

from tailrace.cluster.base import CANCEL_LIMIT_S, CLOSE_LIMIT_S, Cluster, Report, WorkerHandle, WorkerSpec
from tailrace.cluster.process import WorkerProcess
from tailrace.cluster.room import asked, check_room, described
from tailrace.cluster.undertaker import marked
from tailrace.cluster.undertaker import start as start_undertaker
from tailrace.cluster.wire import unpack_error
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterError, ConfigError, TailraceError, WorkerDied, one_line

Result = TypeVar("Result")

_STORE_BYTES = 80 * 2**20
"""Of a local Ray's object store, the least that it takes: nothing large goes through Ray."""
_MAX_BASE_CHARS = 24
"""Of the directory for temporary files: below it are Ray's sockets, whose paths may have 107."""
_REACH_LIMIT_S = 5.0
"""For a cluster to answer at all."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2, and so of gRPC, says first (RFC 9113, section 3.4): its preface and empty settings."""
_FRAME_BYTES, _SETTINGS = 9, 4
"""The header of a frame, whose fourth byte is its type. A server's first frame is its settings."""
_PLACED_SOON_S = 5.0
"""A worker that is not placed by then is said to wait for a place."""
_TOKEN = secrets.token_hex(32)
"""Of every local Ray of this process: Ray's client keeps the first that it reads."""
_KILL_LIMIT_S = 15.0
"""For a keeper to kill its worker, before it is killed itself."""
_TURNS = 10
"""Silence is counted in so many parts, so that a driver that was held up does not blame a keeper."""


class Keeper:
    """The actor that has one worker. What the worker raises is returned, pickled: a call's (value, error)."""

    def __init__(self, spec: WorkerSpec, directory: str, config: ClusterConfig) -> None:
        self._spec, self._directory, self._config = spec, directory, config
        self._worker: WorkerProcess | None = None
        self._calls: dict[int, Task[bytes]] = {}
        self._cancelled: set[int] = set()
        """Calls whose cancellation has come first."""

    async def place(self) -> dict[str, Any]:
        """Where it is."""
        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return {"host": socket.gethostname(), "address": address, "node": node, "keeper": os.getpid()}

    async def ping(self) -> None:
        """It is there."""

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

    async def call(self, id: int, method: str, args: bytes) -> tuple[bytes, bytes]:
        """What a command of the worker returns; nothing if it was cancelled."""
        assert self._worker is not None
        if id in self._cancelled:
            self._cancelled.remove(id)
            return b"", b""
        call = self._calls[id] = asyncio.create_task(self._worker.call(method, args))
        try:
            await asyncio.wait([call])
            return (b"" if call.cancelled() else call.result()), b""
        except TailraceError as error:
            return b"", pickle.dumps(error)
        finally:
            call.cancel()  # if this was cancelled itself
            del self._calls[id]
            self._cancelled.discard(id)

    async def cancel(self, id: int) -> None:
        """Cancel a call. (Ray's own cancellation of a call that has not begun can be lost.)"""
        if id in self._calls:
            self._calls[id].cancel()
        else:
            self._cancelled.add(id)

    async def close(self) -> tuple[bytes, bytes]:
        """Close the worker; its last report."""
        try:
            report = Report() if self._worker is None else await self._worker.close()
        except TailraceError as error:
            return b"", pickle.dumps(error)
        return pickle.dumps(report), b""

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
        self._calls = itertools.count()
        self._has_place = False
        self._watching: Task[None] | None = None
        self._ended = ""
        """How the keeper was ended, where it was."""

    async def open(self) -> None:
        """Wait for a place, and for the worker to open there."""
        place = await self._placed()
        self._watching = asyncio.create_task(self._watch())
        datacentre = _datacentre_of(place["node"])
        opening = self._keeper.open.remote(place["address"], datacentre)
        facts = pickle.loads(await self._answer(opening, cancel=lambda: ray.cancel(opening)))
        self.pid = facts["pid"]
        self.facts = facts | place | {"datacentre": datacentre}

    async def _placed(self) -> dict[str, Any]:
        placed = asyncio.ensure_future(_result(self._keeper.place.remote()))
        limit_s, what = self._config.start_limit_s, described(asked(self._spec.pool))
        try:
            await asyncio.wait([placed], timeout=min(_PLACED_SOON_S, limit_s))
            if not placed.done() and limit_s > _PLACED_SOON_S:
                message = f"{self.name} has not started yet, and is waited for, up to {limit_s:g} s: its keeper starts "
                message += f"slowly, or waits for a place in the cluster, for which it needs {what}"
                print(message, file=sys.stderr)
                await asyncio.wait([placed], timeout=limit_s - _PLACED_SOON_S)
            if not placed.done():
                raise ClusterError(  # not the input's fault: it was checked, and the run may be hours old
                    f"{self.name} was given no place within {limit_s:g} s: its keeper starts slowly, or waits for "
                    f"what it needs, {what}; see that this is free, raise cluster.start_limit_s, or use fewer workers"
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
            while isinstance(item := await _next(stream), Report):
                yield item
        except StopAsyncIteration:
            return
        except RayError as error:
            raise self._obituary(error) from error
        finally:
            if ray.is_initialized():  # else it would be started anew
                ray.cancel(stream)  # nobody reads any more
        raise unpack_error(item)

    async def _watch(self) -> None:
        """Kill the keeper when it stands still; who waits for it hears of that from Ray."""
        limit_s = self._config.heartbeat_limit_s
        while ray.is_initialized():  # else its keepers have ended with it, and a ping would start it anew
            if not await self._answers_ping(limit_s):
                self._ended = self._ended or f"killed, since its keeper gave no sign of life for {limit_s:g} s"
                if ray.is_initialized():
                    ray.kill(self._keeper)
                return
            await asyncio.sleep(limit_s / _TURNS)

    async def _answers_ping(self, limit_s: float) -> bool:
        """Whether it does, be it with Ray's word that it has died."""
        answer = asyncio.ensure_future(_result(self._keeper.ping.remote()))
        answer.add_done_callback(_known)
        try:
            for _ in range(_TURNS):
                if (await asyncio.wait([answer], timeout=limit_s / _TURNS))[0]:
                    return True
            return False
        finally:
            answer.cancel()

    async def call(self, method: str, *args: Any) -> Any:
        id = next(self._calls)
        answer = self._keeper.call.remote(id, method, pickle.dumps(args))
        return pickle.loads(await self._answer(answer, cancel=lambda: self._keeper.cancel.remote(id)))

    async def _answer(self, ref: Any, *, cancel: Callable[[], object] | None) -> bytes:
        """The value that a keeper's method returns. What is cancelled here is to be there, by `cancel`, if at all."""
        answer = asyncio.ensure_future(_result(ref))
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            answer.add_done_callback(_known)  # the cancellation
            if cancel is not None and ray.is_initialized():  # else it has ended with it, and would be started anew
                cancel()
                await asyncio.wait([answer], timeout=CANCEL_LIMIT_S)
            raise
        try:
            value, error = answer.result()
        except RayError as failure:
            raise self._obituary(failure) from failure
        if error:
            raise unpack_error(error)
        return cast(bytes, value)

    def _obituary(self, error: RayError) -> WorkerDied:
        return WorkerDied.of(self.name, self.pid, self._ended or f"its keeper on Ray died: {_told(error)}")

    async def close(self) -> Report:
        answer = await self._end("it was closed", self._keeper.close, CLOSE_LIMIT_S + _KILL_LIMIT_S)
        return pickle.loads(answer) if answer else Report()

    async def kill(self) -> None:
        await self._end("killed", self._keeper.kill, _KILL_LIMIT_S)

    async def _end(self, how: str, method: Any, limit_s: float) -> bytes:
        """Let the keeper end its worker, then end the keeper; what it answers, if it can."""
        if self._watching is not None:
            self._watching.cancel()
        if self._ended:
            return b""
        self._ended = how
        if not ray.is_initialized():  # its keepers have ended with it, and it would be started anew to end this one
            return b""
        try:
            with suppress(TimeoutError, WorkerDied):
                async with asyncio.timeout(limit_s if self._has_place else 0.0):  # without one it has no worker
                    return await self._answer(method.remote(), cancel=None)  # it ends below in any case
        finally:
            if ray.is_initialized():
                ray.kill(self._keeper)
        return b""


class RayCluster(Cluster):
    """Starts workers on Ray: on a cluster that it joins, or a Ray of its own on this machine.

    A process that is connected to Ray already stays so: then that is the cluster, unless another is asked for.
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
            elif self._config.address is not None:
                _check_connected_to(self._config.address)
            machines = [node["Resources"] for node in _nodes() if node["Alive"]]
            if self._config.address is None and len(machines) > 1:
                raise ConfigError(
                    f"this process is connected to a Ray of {len(machines)} machines, and without cluster.address the "
                    "workers of a run listen on this machine alone; give cluster.address=auto"
                )
            check_room(self._pools, machines)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def address(self) -> str:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    @property
    def datacentre(self) -> str:
        return _datacentre_of(ray.get_runtime_context().get_node_id())

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
        try:
            await asyncio.gather(*(handle.kill() for handle in self._handles))
        finally:  # also where the kills are cancelled
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
        self._variables: list[str] = []
        """That were added to the environment."""

    def open(self) -> None:
        """Join the cluster, or start one.

        Raises:
            ConfigError: the cluster cannot be joined.
            ClusterError: no Ray can be started here.
        """
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._add_variable("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address is None:
            base = tempfile.gettempdir()
            self._directory = tempfile.mkdtemp(
                prefix="tailrace-ray-", dir=base if len(base) <= _MAX_BASE_CHARS else "/tmp"
            )
            mark = secrets.token_hex(16)
            self._undertaker = start_undertaker(mark, self._directory)
            self._add_variable("RAY_AUTH_TOKEN", _TOKEN)  # or Ray would leave one in the home directory
            # Ray would kill keepers where memory runs low: they have little, and their workers would go with them.
            self._add_variable("RAY_memory_monitor_refresh_ms", "0")
            self._add_variable("RAY_worker_niceness", "0")  # or workers would give way to everybody, at 15
            # Ray would start an idle worker for each core, however many there are, and keepers are few.
            self._add_variable("RAY_prestart_worker_first_driver", "0")
            with marked(mark):
                self._start(quiet)
            return
        _check_reachable(self._address)
        try:
            ray.init(self._address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"cluster.address {self._address!r} cannot be joined: {one_line(error)}; leave it out to start a "
                "Ray for the run"
            ) from error

    def _start(self, quiet: Mapping[str, Any]) -> None:
        """Twice, where it must be: Ray gives its processes 30 s, which a machine at work may exceed."""
        options: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_temp_dir": self._directory,
        }
        for is_last in (False, True):
            try:
                ray.init("local", **options, **quiet)  # "local": RAY_ADDRESS is for those who ask for it
                return
            except Exception as error:  # what Ray raises then has no narrower type
                ray.shutdown()
                if is_last:
                    raise ClusterError(
                        f"Ray did not start on this machine, twice: {one_line(error)}; see that it has memory and CPUs "
                        "to spare, or join a Ray that runs with cluster.address"
                    ) from error

    def close(self) -> None:
        """Disconnect, and end what was started. Twice is harmless."""
        ray.shutdown()
        if self._undertaker is not None:
            undertaker, self._undertaker = self._undertaker, None
            try:
                undertaker.communicate(b"1", timeout=_KILL_LIMIT_S)
            except subprocess.TimeoutExpired:  # it was stopped, say; Ray's own processes end without it, too
                undertaker.kill()
                undertaker.wait()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
        while self._variables:
            os.environ.pop(self._variables.pop(), None)

    def _add_variable(self, name: str, value: str) -> None:
        """Unless it is set already. Ray reads it from the environment, also later; it goes with the connection."""
        if name not in os.environ:
            os.environ[name] = value
            self._variables.append(name)


def _check_connected_to(address: str) -> None:
    """Whether the Ray that this process is connected to is the one at `address`."""
    connected: str = ray.get_runtime_context().gcs_address
    if address not in ("auto", connected):
        raise ConfigError(
            f"cluster.address is {address!r}, and this process is connected to the Ray at {connected} already; leave "
            "cluster.address out to use that, or call ray.shutdown() before"
        )


def _check_reachable(address: str) -> None:
    """Ray itself takes a minute to say that nobody is there, or somebody else."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address {address!r} must be host:port of a running Ray cluster, or `auto`")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACH_LIMIT_S) as connection:
            is_ray = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(connection)
    except OSError as error:
        raise ConfigError(
            f"cluster.address {address!r} cannot be reached: {error}; start Ray there with `ray start --head`, or "
            "leave it out to start a Ray for the run"
        ) from None
    if not is_ray:
        raise ConfigError(
            f"cluster.address {address!r} is not Ray's: who listens there answers otherwise; give the address that "
            "`ray start --head` has printed, its port 6379 by default"
        )


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether gRPC may be at the other end, within the connection's limit for each part of the answer."""
    try:
        connection.sendall(_HELLO)
        header = connection.recv(_FRAME_BYTES, socket.MSG_WAITALL)
    except OSError:  # it has hung up, or is silent
        return False
    return len(header) == _FRAME_BYTES and header[3] == _SETTINGS


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


def _datacentre_of(node: str) -> str:
    labels: dict[str, dict[str, str]] = {known["NodeID"]: known.get("Labels", {}) for known in _nodes()}
    return labels.get(node, {}).get("datacentre", "")


def _told(error: RayError) -> str:
    """Of what Ray says, the line that gives the reason."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in reversed(lines) if "died because" in line), lines[0])
