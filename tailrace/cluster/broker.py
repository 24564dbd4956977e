"""The process that is connected to Ray for a driver, served as a worker is (tailrace/cluster/serve.py).

    driver: RayProcess ──socket──▶ Broker, in a process of its own: RayCluster ──Ray──▶ keepers ──▶ workers

A process that is connected to Ray is ended by it, without a word, when a part of Ray dies; and Ray's calls wait for a
part that stands still. Both are this process's troubles here, and not the driver's, which is told, and ends it.
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tailrace.cluster.base import Answer, Report, Worker, WorkerContext, WorkerSpec
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterLost

FACTORY = "tailrace.cluster.broker:make"
_PARTS = ("gcs_server", "raylet")
"""Without these there is no Ray. They end by themselves when an agent of theirs has."""
_LOOK_S = 0.5
"""Between looks at them."""


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker is told."""

    config: bytes
    """A pickled ClusterConfig."""
    pools: bytes
    """Pickled: the pools that will be started, by their names in `config`."""
    directory: str
    """For the files of a Ray that it starts."""


class Broker(Worker):
    """Starts workers on Ray, and passes on what is said to them and by them."""

    def __init__(self, settings: BrokerSettings) -> None:
        from tailrace.cluster.ray import RayCluster, RayHandle  # imports Ray, which the driver does not need

        config: ClusterConfig = pickle.loads(settings.config)
        self._parts = _PARTS if config.address is None else ()
        """Of the Ray that is started here."""
        pools: dict[str, PoolConfig] = pickle.loads(settings.pools)
        self._cluster = RayCluster(config, pools, Path(settings.directory))
        self._handles: dict[int, RayHandle] = {}
        self._reports: dict[int, AsyncGenerator[Report, None]] = {}

    async def open(self) -> dict[str, Any]:
        """Connect to Ray; what `Cluster` has of itself."""
        await self._cluster.__aenter__()
        return {"address": self._cluster.address, "datacentre": self._cluster.datacentre}

    async def run(self) -> None:
        """See that the Ray that was started here goes on.

        Raises:
            ClusterLost: a part of it has ended. Ray itself would say so after a minute, with the end of this process.
        """
        children = {_name(child): child for child in psutil.Process().children()}
        while not (ended := [name for name in self._parts if not (name in children and _lives(children[name]))]):
            await asyncio.sleep(_LOOK_S)
        raise ClusterLost(f"{ended[0]} has ended")

    async def start(self, id: int, spec: WorkerSpec) -> tuple[int, dict[str, Any]]:
        """Start a worker, which is `id` from now on; its pid, and the facts about it."""
        self._handles[id] = handle = await self._cluster.start(spec)
        self._reports[id] = handle.reports()
        return handle.pid, handle.facts

    async def next_report(self, id: int) -> Report | None:
        """The next of a worker's reports, or None after the last one."""
        return await anext(self._reports[id], None)

    async def end_reports(self, id: int) -> None:
        """Nobody reads them any more."""
        await self._reports[id].aclose()

    async def call(self, id: int, method: str, args: bytes) -> Answer:
        """The answer to a command of a worker."""
        return await self._handles[id].call_packed(method, args)

    async def close_worker(self, id: int) -> Report:
        """Close a worker."""
        return await self._handles[id].close()

    async def kill_worker(self, id: int) -> None:
        """Kill a worker."""
        await self._handles[id].kill()

    async def shut_down(self) -> None:
        """Let go of Ray, and end what was started. Twice is harmless."""
        await self._cluster.close()

    async def close(self) -> None:
        """The same, after an `open` that has failed."""
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
    """For `WorkerSpec.factory`."""
    return Broker(msgspec.msgpack.decode(settings, type=BrokerSettings))
