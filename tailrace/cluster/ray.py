"""Workers on Ray, for a process that is connected to it.

    RayHandle ──Ray──▶ Keeper, an actor with the worker's resources ──▶ RankProcess ──▶ the worker

Ray places keepers and carries what is said; each keeper has one worker process (tailrace/cluster/process.py). A
keeper reports the death of its worker. A keeper that dies, with its machine or else, takes its worker with it, and Ray
reports that; one that does not answer a ping for `heartbeat_limit_s` is killed.

A process that is connected ends when its Ray does, and waits without a limit for one that stands still. So the driver
of a run leaves all this to a process of its own (tailrace/cluster/broker.py).
"""

import asyncio
import itertools
import os
import pickle
import socket
import sys
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
    WAITED_FOR,
    Answer,
    Cluster,
    Report,
    WorkerHandle,
    WorkerSpec,
    unheard,
)
from tailrace.cluster.connection import check_connected_to, connect
from tailrace.cluster.environment import worker_environment
from tailrace.cluster.process import RankProcess
from tailrace.cluster.room import asked, check_room, described
from tailrace.cluster.wire import unpack_error
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterError, ConfigError, TailraceError, WorkerDied

Result = TypeVar("Result")

_PLACED_SOON_S = 5.0
"""A worker that is not placed by then is said to wait for a place."""
_KILL_LIMIT_S = 15.0
"""For a keeper to kill its worker, before it is killed itself."""
_KEEPER_LIMIT_S = 5.0
"""For Ray to kill a keeper."""
_TURNS = 10
"""Silence is counted in so many parts, so that a driver that was held up does not blame a keeper."""


class Keeper:
    """The actor that has one worker. What the worker raises is returned, pickled: a call's (value, error)."""

    def __init__(self, spec: WorkerSpec, directory: str, config: ClusterConfig) -> None:
        self._spec, self._directory, self._config = spec, directory, config
        self._worker: RankProcess | None = None
        self._calls: dict[int, Task[Answer]] = {}
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
            self._worker, facts = await RankProcess.start(
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
        """The worker's reports, and last the error that ended it, if one did."""
        assert self._worker is not None
        try:
            async for report in self._worker.reports():
                yield report
        except TailraceError as error:
            yield pickle.dumps(error)

    async def call(self, id: int, method: str, args: bytes) -> tuple[bytes, bytes]:
        """The answer to a command, packed; nothing if it was cancelled."""
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
                message = f"{self.name} {WAITED_FOR}, up to {limit_s:g} s: its keeper starts "
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
            if ray.is_initialized():  # else it would be started anew
                ray.cancel(stream)  # nobody reads any more
        raise unpack_error(item)

    async def _watch(self) -> None:
        """Kill the keeper when it stands still; who waits for it hears of that from Ray."""
        limit_s = self._config.heartbeat_limit_s
        while ray.is_initialized():  # else its keepers have ended with it, and a ping would start it anew
            if not await self._answers_ping(limit_s):
                self._ended = self._ended or f"killed, since its keeper gave no sign of life for {limit_s:g} s"
                await self._kill_keeper()
                return
            await asyncio.sleep(limit_s / _TURNS)

    async def _answers_ping(self, limit_s: float) -> bool:
        """Whether it does, be it with Ray's word that it has died."""
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
        """The same, with the arguments pickled."""
        id = next(self._calls)
        answer = self._keeper.call.remote(id, method, args)
        packed = await self._answer(answer, cancel=lambda: self._keeper.cancel.remote(id))
        return msgspec.msgpack.decode(packed, type=Answer)

    async def _answer(self, ref: Any, *, cancel: Callable[[], object] | None) -> bytes:
        """The value that a keeper's method returns. What is cancelled here is to be there, by `cancel`, if at all."""
        answer = asyncio.ensure_future(_result(ref))
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            answer.add_done_callback(unheard)  # the cancellation
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
        """See `WorkerHandle`."""
        answer = await self._end("it was closed", self._keeper.close, CLOSE_LIMIT_S + _KILL_LIMIT_S)
        return pickle.loads(answer) if answer else Report()

    async def kill(self) -> None:
        """See `WorkerHandle`."""
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
            await self._kill_keeper()
        return b""

    async def _kill_keeper(self) -> None:
        """Ray waits for its GCS as long as that stands still."""
        if ray.is_initialized():
            killing = asyncio.ensure_future(asyncio.to_thread(ray.kill, self._keeper))
            killing.add_done_callback(unheard)
            await asyncio.wait([killing], timeout=_KEEPER_LIMIT_S)


class RayCluster(Cluster):
    """Starts workers on Ray: on a cluster that it joins, or a Ray that it starts on this machine.

    A process that is connected to Ray already stays so: then that is the cluster, unless another is asked for.
    """

    def __init__(self, config: ClusterConfig, pools: Mapping[str, PoolConfig], directory: Path | None = None) -> None:
        """`pools`: by their names in `config`, all that will be started here. `directory`: see `connect`."""
        self._config = config
        self._pools = pools
        self._directory = directory
        self._handles: list[RayHandle] = []
        # The kernel ends the processes of a local Ray with the thread that started them: it must live as long.
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
            machines = [node["Resources"] for node in _nodes() if node["Alive"]]
            if address is None and len(machines) > 1:
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
        """See `Cluster`."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    @property
    def datacentre(self) -> str:
        """See `Cluster`."""
        return _datacentre_of(ray.get_runtime_context().get_node_id())

    async def start(self, spec: WorkerSpec) -> RayHandle:
        """See `Cluster`."""
        handle = RayHandle(spec, self._config)
        self._handles.append(handle)
        try:
            await handle.open()
        except BaseException:
            await handle.kill()
            raise
        return handle

    async def close(self) -> None:
        """See `Cluster`."""
        try:
            await asyncio.gather(*(handle.kill() for handle in self._handles))
        finally:  # also where the kills are cancelled
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


def _datacentre_of(node: str) -> str:
    labels: dict[str, dict[str, str]] = {known["NodeID"]: known.get("Labels", {}) for known in _nodes()}
    return labels.get(node, {}).get("datacentre", "")


def _told(error: RayError) -> str:
    """Of what Ray says, the line that gives the reason."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in reversed(lines) if "died because" in line), lines[0])
