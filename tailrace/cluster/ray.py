"""Workers on Ray, for a process that is connected to Ray.

    RayHandle ──Ray──▶ Keeper, an actor with the worker's resources ──▶ WorkerProcess ──▶ the worker

Ray places keepers and carries messages. Each keeper has one worker process (tailrace/cluster/process.py) and reports
its death. When a keeper dies, alone or with its machine, its worker dies too, and Ray reports that. A keeper that does
not answer a ping for `heartbeat_limit_s` is killed.

A process that is connected to Ray ends when Ray does, and waits without a limit for a Ray that stands still. So the
driver of a run leaves all this to a separate process (tailrace/cluster/broker.py).
"""

import asyncio
import itertools
import os
import pickle
import socket
from asyncio import Task
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec
import ray
from ray.exceptions import RayError

from tailrace.cluster.base import (
    CANCEL_LIMIT_S,
    CLOSE_LIMIT_S,
    Answer,
    Cluster,
    Report,
    WorkerHandle,
    WorkerSpec,
    unheard,
)
from tailrace.cluster.connection import check_connected_to, connect
from tailrace.cluster.environment import worker_environment
from tailrace.cluster.process import WorkerProcess
from tailrace.cluster.room import asked, check_room, described
from tailrace.cluster.wire import unpack_error
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterError, ConfigError, TailraceError, WorkerDied

Result = TypeVar("Result")

_PLACED_SOON_S = 5.0
"""Seconds to place a worker before a message says that it waits for a place."""
_KILL_LIMIT_S = 15.0
"""Seconds for a keeper to kill its worker, before the keeper is killed."""
_KEEPER_LIMIT_S = 5.0
"""Seconds for Ray to kill a keeper."""
_DATACENTRE = "datacentre"
"""The label of Ray's nodes."""
_TURNS = 10
"""The number of parts in which silence is measured, so that a driver that was held up does not blame a keeper."""


class Keeper:
    """The actor that has one worker.

    Methods that concern the worker return (value, error): an error of the worker is pickled, and not raised.
    """

    def __init__(self, spec: WorkerSpec, directory: str, config: ClusterConfig) -> None:
        self._spec, self._directory, self._config = spec, directory, config
        self._worker: WorkerProcess | None = None
        self._calls: dict[int, Task[Answer]] = {}
        self._cancelled: set[int] = set()
        """The calls whose cancellation has come before the call."""

    async def place(self) -> dict[str, Any]:
        """Return the `host`, `address` (IP), `node` (Ray's id) and pid (`keeper`) of this keeper."""
        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return {"host": socket.gethostname(), "address": address, "node": node, "keeper": os.getpid()}

    async def ping(self) -> None:
        """Return, which shows that the keeper is alive."""

    async def open(self, address: str, datacentre: str) -> tuple[bytes, bytes]:
        """Start the worker. Return the pickled facts about it."""
        try:
            self._worker, facts = await WorkerProcess.start(
                self._spec,
                environment=worker_environment(os.environ, self._spec.pool),
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
        """Yield the worker's reports. If an error ends them, it comes last, pickled."""
        assert self._worker is not None
        try:
            async for report in self._worker.reports():
                yield report
        except TailraceError as error:
            yield pickle.dumps(error)

    async def call(self, id: int, method: str, args: bytes) -> tuple[bytes, bytes]:
        """Call a command. Return the packed answer; empty if the call was cancelled."""
        assert self._worker is not None
        if id in self._cancelled:
            self._cancelled.remove(id)
            return b"", b""
        call = self._calls[id] = asyncio.create_task(self._worker.call(method, args))
        try:
            await asyncio.wait([call])
            return (b"" if call.cancelled() else msgspec.msgpack.encode(call.result())), b""
        except TailraceError as error:
            return b"", pickle.dumps(error)
        finally:
            call.cancel()  # in case this method was cancelled
            del self._calls[id]
            self._cancelled.discard(id)

    async def cancel(self, id: int) -> None:
        """Cancel a call. (Ray's own cancellation of a call that has not begun can be lost.)"""
        if id in self._calls:
            self._calls[id].cancel()
        else:
            self._cancelled.add(id)

    async def close(self) -> tuple[bytes, bytes]:
        """Close the worker. Return its last report, pickled."""
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
        if spec.pool.datacentre is not None:
            options["label_selector"] = {_DATACENTRE: spec.pool.datacentre}
        self._keeper: Any = ray.remote(Keeper).options(**options).remote(spec, os.getcwd(), config)
        self._calls = itertools.count()
        self._has_place = False
        self._watching: Task[None] | None = None
        self._ended = ""
        """How this handle ended the keeper, if it did."""

    async def open(self, on_wait: Callable[[str], None]) -> None:
        """Wait until the keeper has a place and the worker has opened there. `on_wait`: see `Cluster.start`."""
        place = await self._placed(on_wait)
        self._watching = asyncio.create_task(self._watch())
        datacentre = _datacentre_of(place["node"])
        opening = self._keeper.open.remote(place["address"], datacentre)
        facts = pickle.loads(await self._answer(opening, cancel=lambda: ray.cancel(opening)))
        self.pid = facts["pid"]
        self.facts = facts | place | {"datacentre": datacentre}

    async def _placed(self, on_wait: Callable[[str], None]) -> dict[str, Any]:
        placed = asyncio.ensure_future(_result(self._keeper.place.remote()))
        limit_s, what = self._config.start_limit_s, described(asked(self._spec.pool))
        if (datacentre := self._spec.pool.datacentre) is not None:
            what += f" in the datacentre {datacentre}"
        try:
            await asyncio.wait([placed], timeout=min(_PLACED_SOON_S, limit_s))
            if not placed.done() and limit_s > _PLACED_SOON_S:
                on_wait(
                    f"{self.name} has not started yet, and is waited for, up to {limit_s:g} s: its keeper starts "
                    f"slowly, or waits for a place in the cluster, for which it needs {what}"
                )
                await asyncio.wait([placed], timeout=limit_s - _PLACED_SOON_S)
            if not placed.done():
                raise ClusterError(  # no ConfigError: the configuration was checked, and the run may be hours old
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
        """See `WorkerHandle`."""
        stream = self._keeper.reports.remote()
        try:
            while isinstance(item := await _next(stream), Report):
                yield item
        except StopAsyncIteration:
            return
        except RayError as error:
            raise self._obituary(error) from error
        finally:
            if ray.is_initialized():  # else the call would start Ray again
                ray.cancel(stream)  # the reader has stopped
        raise unpack_error(item)

    async def _watch(self) -> None:
        """Kill the keeper when it stands still. Ray then reports its death to calls that wait for it."""
        limit_s = self._config.heartbeat_limit_s
        while ray.is_initialized():  # else the keepers have ended with Ray, and a ping would start Ray again
            if not await self._answers_ping(limit_s):
                self._ended = self._ended or f"killed, since its keeper gave no sign of life for {limit_s:g} s"
                await self._kill_keeper()
                return
            await asyncio.sleep(limit_s / _TURNS)

    async def _answers_ping(self, limit_s: float) -> bool:
        """Whether the keeper answers a ping, or Ray reports that it has died."""
        answer = asyncio.ensure_future(_result(self._keeper.ping.remote()))
        answer.add_done_callback(unheard)
        try:
            for _ in range(_TURNS):
                if (await asyncio.wait([answer], timeout=limit_s / _TURNS))[0]:
                    return True
            return False
        finally:
            answer.cancel()

    async def call(self, method: str, *args: Any) -> Any:
        """See `WorkerHandle`."""
        answer = await self.call_packed(method, pickle.dumps(args))
        self.told = answer.told
        return pickle.loads(answer.value)

    async def call_packed(self, method: str, args: bytes) -> Answer:
        """Call a command with pickled arguments, see `call`. Return the answer."""
        id = next(self._calls)
        answer = self._keeper.call.remote(id, method, args)
        packed = await self._answer(answer, cancel=lambda: self._keeper.cancel.remote(id))
        return msgspec.msgpack.decode(packed, type=Answer)

    async def _answer(self, ref: Any, *, cancel: Callable[[], object] | None) -> bytes:
        """Return the value of a keeper's method. If this is cancelled, `cancel` cancels the method in the keeper.

        Raises:
            TailraceError: the error that the method returned.
            WorkerDied: the keeper died.
        """
        answer = asyncio.ensure_future(_result(ref))
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            answer.add_done_callback(unheard)
            if cancel is not None and ray.is_initialized():  # else Ray has ended, and a call would start it again
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
        """See `WorkerHandle`."""
        answer = await self._end("it was closed", self._keeper.close, CLOSE_LIMIT_S + _KILL_LIMIT_S)
        return pickle.loads(answer) if answer else Report()

    async def kill(self) -> None:
        """See `WorkerHandle`."""
        await self._end("killed", self._keeper.kill, _KILL_LIMIT_S)

    async def _end(self, how: str, method: Any, limit_s: float) -> bytes:
        """Let the keeper end its worker, then kill the keeper. Return the keeper's answer; empty if there is none."""
        if self._watching is not None:
            self._watching.cancel()
        if self._ended:
            return b""
        self._ended = how
        if not ray.is_initialized():  # the keepers have ended with Ray, and a call would start Ray again
            return b""
        try:
            with suppress(TimeoutError, WorkerDied):
                async with asyncio.timeout(limit_s if self._has_place else 0.0):  # no place: no worker
                    return await self._answer(method.remote(), cancel=None)  # the keeper is killed below in any case
        finally:
            await self._kill_keeper()
        return b""

    async def _kill_keeper(self) -> None:
        """Have Ray kill the keeper, from a thread and with a limit: Ray waits for a GCS that stands still."""
        if ray.is_initialized():
            killing = asyncio.ensure_future(asyncio.to_thread(ray.kill, self._keeper))
            killing.add_done_callback(unheard)
            await asyncio.wait([killing], timeout=_KEEPER_LIMIT_S)


class RayCluster(Cluster):
    """Starts workers on Ray: on a cluster that it joins, or a Ray that it starts on this machine.

    If the process is connected to Ray already, that Ray is the cluster. It is an error to ask for another one.
    """

    def __init__(self, config: ClusterConfig, pools: Mapping[str, PoolConfig], directory: Path | None = None) -> None:
        """`pools`: all pools that will be started here, by their names in `config`. `directory`: see `connect`."""
        self._config = config
        self._pools = pools
        self._directory = directory
        self._handles: list[RayHandle] = []
        # The kernel ends the processes of a local Ray with the thread that started them, so the thread must stay.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._disconnect: Callable[[], object] | None = None

    async def __aenter__(self) -> Self:
        address = self._config.address
        try:
            if not ray.is_initialized():
                self._disconnect = ray.shutdown
                await self._in_thread(lambda: connect(address, self._directory))
            elif address is not None:
                check_connected_to(address)
            if address is None and (machines := len(_alive())) > 1:
                raise ConfigError(
                    f"this process is connected to a Ray of {machines} machines, and without cluster.address the "
                    "workers of a run listen on this machine alone; give cluster.address=auto"
                )
            _check_room(self._pools)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def address(self) -> str:
        """See `Cluster`."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    @property
    def datacentre(self) -> str:
        """See `Cluster`."""
        return _datacentre_of(ray.get_runtime_context().get_node_id())

    async def check_room(self, pools: Mapping[str, PoolConfig]) -> None:
        """See `Cluster`."""
        if self._config.address is None:
            _check_room(pools)

    async def start(self, spec: WorkerSpec, on_wait: Callable[[str], None] = lambda _: None) -> RayHandle:
        """See `Cluster`."""
        handle = RayHandle(spec, self._config)
        self._handles.append(handle)
        try:
            await handle.open(on_wait)
        except BaseException:
            await handle.kill()
            raise
        return handle

    async def close(self) -> None:
        """See `Cluster`."""
        try:
            await asyncio.gather(*(handle.kill() for handle in self._handles))
        finally:  # also if the kills are cancelled
            self._handles.clear()
            if self._disconnect is not None:
                disconnect, self._disconnect = self._disconnect, None
                await self._in_thread(disconnect)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _result(ref: Any) -> Any:
    return await ref


async def _next(stream: Any) -> Any:
    return await (await anext(stream))


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _alive() -> list[dict[str, Any]]:
    return [node for node in _nodes() if node["Alive"]]


def _check_room(pools: Mapping[str, PoolConfig]) -> None:
    nodes = _alive()
    datacentres = [node.get("Labels", {}).get(_DATACENTRE, "") for node in nodes]
    check_room(pools, [node["Resources"] for node in nodes], datacentres)


def _datacentre_of(node: str) -> str:
    labels: dict[str, dict[str, str]] = {known["NodeID"]: known.get("Labels", {}) for known in _nodes()}
    return labels.get(node, {}).get(_DATACENTRE, "")


def _told(error: RayError) -> str:
    """Return the line of Ray's error that gives the reason."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in reversed(lines) if "died because" in line), lines[0])
