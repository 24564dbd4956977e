"""The process that is connected to Ray for a driver. It is served like a worker (tailrace/cluster/serve.py).

    driver: RayProcess ──socket──▶ Broker, in a separate process: RayCluster ──Ray──▶ keepers ──▶ workers

When a part of Ray dies, Ray ends the processes that are connected to it without a message. And Ray's calls wait for a
part that stands still. Here both happen to the broker, not to the driver, which learns of it and ends the broker.
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tailrace.cluster.base import Answer, Report, Worker, WorkerContext, WorkerSpec
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterLost
from tailrace.events import Event, Sink
from tailrace.registers.events import EventKind

FACTORY = "tailrace.cluster.broker:make"
_PARTS = ("gcs_server", "raylet")
"""The processes that Ray cannot go on without. They end by themselves when one of their agents has ended."""
_LOOK_S = 0.5
"""Seconds between checks of these processes."""


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a broker."""

    config: bytes
    """A pickled ClusterConfig."""
    pools: bytes
    """The pools that will be started, by their names in `config`, pickled."""
    directory: str
    """The directory for the files of a Ray that the broker starts."""


class Broker(Worker):
    """Starts workers on Ray, and passes on calls and reports."""

    def __init__(self, settings: BrokerSettings, emit: Sink) -> None:
        from tailrace.cluster.ray import RayCluster, RayHandle  # imports Ray, which the driver does not need

        config: ClusterConfig = pickle.loads(settings.config)
        self._parts = _PARTS if config.address is None else ()
        """The processes to check; none if Ray is not started here."""
        pools: dict[str, PoolConfig] = pickle.loads(settings.pools)
        self._cluster = RayCluster(config, pools, Path(settings.directory))
        self._emit = emit
        self._handles: dict[int, RayHandle] = {}
        self._reports: dict[int, AsyncGenerator[Report, None]] = {}

    async def open(self) -> dict[str, Any]:
        """Connect to Ray. Return the `address` and the `datacentre` of the cluster."""
        await self._cluster.__aenter__()
        return {"address": self._cluster.address, "datacentre": self._cluster.datacentre}

    async def run(self) -> None:
        """Check that the Ray that was started here goes on.

        Raises:
            ClusterLost: a part of Ray has ended. Ray itself would notice after a minute, and end this process.
        """
        children = {_name(child): child for child in psutil.Process().children()}
        while not (ended := [name for name in self._parts if not (name in children and _lives(children[name]))]):
            await asyncio.sleep(_LOOK_S)
        raise ClusterLost(f"{ended[0]} has ended")

    async def check_room(self, pools: Mapping[str, PoolConfig]) -> None:
        """See `Cluster`."""
        await self._cluster.check_room(pools)

    async def start(self, id: int, spec: WorkerSpec) -> tuple[int, dict[str, Any]]:
        """Start a worker under the name `id`. Return its pid and the facts about it.

        While it waits for a place, an event says so; its times are left to the driver, which has the clock.
        """

        def tell(text: str) -> None:
            self._emit(Event(task=EventKind.WORKER_WAITS, actor=spec.name, start=0.0, end=0.0, info={"text": text}))

        self._handles[id] = handle = await self._cluster.start(spec, tell)
        self._reports[id] = handle.reports()
        return handle.pid, handle.facts

    async def next_report(self, id: int) -> Report | None:
        """Return the next report of a worker, or None after the last one."""
        return await anext(self._reports[id], None)

    async def end_reports(self, id: int) -> None:
        """Stop reading a worker's reports."""
        await self._reports[id].aclose()

    async def call(self, id: int, method: str, args: bytes) -> Answer:
        """Call a command of a worker and return its answer."""
        return await self._handles[id].call_packed(method, args)

    async def close_worker(self, id: int) -> Report:
        """Close a worker. Return its last report."""
        return await self._handles[id].close()

    async def kill_worker(self, id: int) -> None:
        """Kill a worker."""
        if id in self._handles:  # else its start has failed, and has killed it
            await self._handles[id].kill()

    async def shut_down(self) -> None:
        """Disconnect from Ray, and end all that was started. Calling it twice is harmless."""
        await self._cluster.close()

    async def close(self) -> None:
        """Do the same as `shut_down`. It is needed after an `open` that failed."""
        await self._cluster.close()


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def make(settings: bytes, context: WorkerContext) -> Broker:
    """Make a broker: the factory for `WorkerSpec.factory`."""
    return Broker(msgspec.msgpack.decode(settings, type=BrokerSettings), context.emit)
