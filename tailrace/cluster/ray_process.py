"""The driver's end of Ray, which runs in separate processes.

    RayProcess ──▶ guard ──▶ broker ──▶ Ray's own processes ──▶ keepers ──▶ workers
               ──▶ cleanup process: ends all of them, and removes their files, should the driver be killed

Waiting: a call waits for the broker (tailrace/cluster/broker.py), which dies with its Ray; then all waiting calls raise
ClusterLost. A broker that stands still is killed after `heartbeat_limit_s`, or after 180 s while it starts. Closing has
limits of its own: processes that have not closed in time are killed, with all processes that were started for them.
"""

import asyncio
import itertools
import logging
import os
import pickle
import secrets
import subprocess
from asyncio import Task
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from tailrace.cluster.base import Answer, Cluster, Report, WorkerHandle, WorkerSpec, unheard
from tailrace.cluster.broker import FACTORY, BrokerSettings
from tailrace.cluster.cleanup import MARK, clean_up
from tailrace.cluster.cleanup import start as start_cleanup
from tailrace.cluster.environment import importable, ray_environment
from tailrace.cluster.process import WorkerProcess
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import ClusterError, ClusterLost, TailraceError, WorkerDied
from tailrace.transfer.wire.sockets import private_directory

_log = logging.getLogger(__name__)

_NAME = "ray"
"""The broker's name, in the place of a worker's."""
_MAX_PARENT_BYTES = 19
"""The longest path of the directory for temporary files, in bytes. Below it are Ray's sockets, whose paths may have 107
bytes."""
_START_LIMIT_S = 180.0
"""Seconds for the broker to connect. Ray gives its processes 30 s, and the broker tries twice."""
_END_LIMIT_S = 40.0
"""Seconds for a worker to be closed or killed; its keeper's limits together are shorter."""
_CLOSE_LIMIT_S = 30.0
"""Seconds for Ray to shut down."""
_CLEANUP_LIMIT_S = 15.0
"""Seconds for the remaining processes to be gone after they were killed."""


def ray_directory() -> Path:
    """Make a new directory for Ray, inside one that other users cannot enter: Ray lets everybody write to its own.

    Raises:
        WireError: it cannot be made.
    """
    return private_directory("tailrace-ray-", max_parent_bytes=_MAX_PARENT_BYTES) / "r"


class _Handle(WorkerHandle):
    """A worker behind the broker."""

    def __init__(self, ray: "RayProcess", id: int, name: str) -> None:
        self.name = name
        self.pid = 0
        self.facts = {}
        self._ray, self._id = ray, id

    async def open(self, spec: WorkerSpec) -> None:
        self.pid, self.facts = await self._ray.ask("start", self._id, spec)

    async def reports(self) -> AsyncGenerator[Report, None]:
        try:
            while (report := await self._ray.ask("next_report", self._id)) is not None:
                yield report
        finally:
            with suppress(ClusterLost):
                await self._ray.ask("end_reports", self._id)

    async def call(self, method: str, *args: Any) -> Any:
        answer: Answer = await self._ray.ask("call", self._id, method, pickle.dumps(args))
        self.told = answer.told
        return pickle.loads(answer.value)

    async def close(self) -> Report:
        report = await self._ray.ask_in_time("close_worker", self._id)
        return report if isinstance(report, Report) else Report()

    async def kill(self) -> None:
        await self._ray.ask_in_time("kill_worker", self._id)


class RayProcess(Cluster):
    """Starts workers on Ray: on a cluster that it joins, or on a Ray that it starts on this machine and ends."""

    def __init__(self, config: ClusterConfig, pools: Mapping[str, PoolConfig]) -> None:
        """`pools`: all pools that will be started here, by their names in `config`."""
        self._config = config
        self._pools = pools
        self._ids = itertools.count()
        self._mark = secrets.token_hex(16)
        self._directory: Path | None = None
        """The directory of a Ray that is started here."""
        self._cleanup: subprocess.Popen[bytes] | None = None
        self._process: WorkerProcess | None = None
        self._facts: dict[str, Any] = {}
        self._listening: Task[None] | None = None
        self._on_wait: dict[str, Callable[[str], None]] = {}
        """Of each worker that is being started: called while it waits for a place."""
        self._why = ""
        """The broker's reason why Ray has ended, if it gave one."""

    async def __aenter__(self) -> Self:
        environment = dict(os.environ)
        try:
            if self._config.address is None:
                self._directory = ray_directory()
                self._cleanup = start_cleanup(self._mark, str(self._directory.parent))
                environment = ray_environment(environment) | {MARK: self._mark}
            await self._open(environment)
        except BaseException:
            await self.close()
            raise
        return self

    async def _open(self, environment: Mapping[str, str]) -> None:
        settings = BrokerSettings(
            config=pickle.dumps(self._config), pools=pickle.dumps(dict(self._pools)), directory=str(self._directory)
        )
        spec = WorkerSpec(name=_NAME, pool=PoolConfig(), factory=FACTORY, settings=msgspec.msgpack.encode(settings))
        try:
            self._process, facts = await WorkerProcess.start(
                spec,
                environment=importable(environment),
                directory=os.getcwd(),
                address="127.0.0.1",
                datacentre="",
                start_limit_s=_START_LIMIT_S,
                heartbeat_limit_s=self._config.heartbeat_limit_s,
            )
        except WorkerDied as death:
            raise ClusterError(f"no Ray could be had: its process ended: {death.how}") from death
        self._facts = pickle.loads(facts)
        self._listening = asyncio.create_task(self._listen(self._process))

    async def _listen(self, process: WorkerProcess) -> None:
        try:
            async for report in process.reports():
                for event in report.events:  # its lines are left: when a part of Ray has died, it prints its logs
                    if event.actor in self._on_wait:
                        self._on_wait[event.actor](event.info["text"])
        except WorkerDied:
            pass  # calls that wait raise an error
        except TailraceError as error:  # Ray has ended, or the broker has failed
            self._why = str(error)
            await process.kill(self._why)

    @property
    def address(self) -> str:
        """See `Cluster`."""
        address: str = self._facts["address"]
        return address

    @property
    def datacentre(self) -> str:
        """See `Cluster`."""
        datacentre: str = self._facts["datacentre"]
        return datacentre

    async def check_room(self, pools: Mapping[str, PoolConfig]) -> None:
        """See `Cluster`."""
        await self.ask("check_room", dict(pools))

    async def start(self, spec: WorkerSpec, on_wait: Callable[[str], None] = lambda _: None) -> WorkerHandle:
        """See `Cluster`."""
        handle = _Handle(self, next(self._ids), spec.name)
        self._on_wait[spec.name] = on_wait
        try:
            await handle.open(spec)
        except asyncio.CancelledError:
            await handle.kill()  # the worker may have started just now
            raise
        finally:
            del self._on_wait[spec.name]
        return handle

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a command of the broker and return its result.

        Raises:
            ClusterLost: Ray has ended.
            TailraceError: the error that the command raised.
        """
        if self._process is None:
            raise ClusterLost("the Ray that had the workers was ended")
        try:
            return pickle.loads((await self._process.call(method, pickle.dumps(args))).value)
        except WorkerDied as death:
            if death.worker != _NAME:
                raise
            raise ClusterLost(f"the Ray that had the workers has ended: {self._why or death.how}") from death

    async def ask_in_time(self, method: str, *args: Any) -> Any:
        """Call a command that ends a worker, see `ask`. Return None if Ray has ended or stands still.

        In that case `close` ends all that is left.
        """
        asking = asyncio.create_task(self.ask(method, *args))
        try:
            await asyncio.wait([asking], timeout=_END_LIMIT_S)
        finally:
            asking.add_done_callback(unheard)
        with suppress(ClusterLost):
            return asking.result() if asking.done() else None

    async def close(self) -> None:
        """Shut Ray down. Kill all processes that are left of it, and remove its files."""
        process, self._process = self._process, None
        try:
            if process is not None:
                await self._shut_down(process)
        finally:  # also if the shutdown is cancelled
            if self._listening is not None:
                self._listening.cancel()
            cleanup, self._cleanup = self._cleanup, None
            if cleanup is not None:
                assert self._directory is not None
                await asyncio.to_thread(_clean_up, cleanup, self._mark, str(self._directory.parent))

    async def _shut_down(self, process: WorkerProcess) -> None:
        shutting = asyncio.create_task(process.call("shut_down", pickle.dumps(())))
        shutting.add_done_callback(unheard)
        try:
            await asyncio.wait([shutting], timeout=_CLOSE_LIMIT_S)
            if not shutting.done():
                _log.warning(
                    f"Ray has not shut down within {_CLOSE_LIMIT_S:g} s, and is killed with all that it has started"
                )
        finally:
            await process.kill()


def _clean_up(process: "subprocess.Popen[bytes]", mark: str, directory: str) -> None:
    """Kill the processes that are left, and end the cleanup process, which is no longer needed."""
    clean_up(mark, directory, limit_s=_CLEANUP_LIMIT_S)
    try:
        process.communicate(b"1", timeout=_CLEANUP_LIMIT_S)
    except subprocess.TimeoutExpired:  # for example because it was stopped
        process.kill()
        process.wait()
