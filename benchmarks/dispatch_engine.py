"""The worker of `dispatch_real.py`: an engine on a core of its own, behind the port that rollout workers have."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from tailrace.activity import Activity
from tailrace.cluster.base import Worker, WorkerContext
from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.opening import open_engine
from tailrace.events import EventLog
from tailrace.rollout.base import EngineFacts, News, Parcel
from tailrace.rollout.local import LocalPort


class Settings(msgspec.Struct, frozen=True):
    """What the worker is told."""

    model_dir: str
    engine: str
    """A NativeEngineConfig as JSON."""
    room: int


class EngineWorker(Worker):
    """Serves an engine until it is closed."""

    def __init__(self, settings: bytes, context: WorkerContext) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=Settings)
        self._log = EventLog(sinks=(context.emit,), worker=context.name)
        self._stack = AsyncExitStack()
        self._port: LocalPort

    async def open(self) -> dict[str, Any]:
        """Load the engine."""
        from tailrace.host.compute import prepare_torch

        prepare_torch("cpu", 1)
        thread = self._stack.enter_context(ThreadPoolExecutor(max_workers=1))
        config = NativeEngineConfig.model_validate_json(self._settings.engine)
        engine = await open_engine(config, Path(self._settings.model_dir), device="cpu", executor=thread)
        self._stack.push_async_callback(engine.close)
        facts = EngineFacts(room=self._settings.room, continues=engine.continues)
        self._port = LocalPort(engine, facts, log=self._log, activity=Activity(self._log, "engine"))
        self._stack.push_async_callback(self._port.close)
        return {}

    async def run(self) -> None:
        """There is nothing to do but to answer calls."""
        import asyncio

        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """See `Worker`."""
        await self._stack.aclose()

    async def ready(self) -> EngineFacts:
        """See `EnginePort`."""
        return await self._port.ready()

    async def give(self, parcels: Sequence[Parcel]) -> None:
        """See `EnginePort`."""
        await self._port.give(parcels)

    async def news(self) -> list[News]:
        """See `EnginePort`."""
        return await self._port.news()

    async def withdraw(self, request_ids: Collection[int]) -> None:
        """See `EnginePort`."""
        await self._port.withdraw(request_ids)

    async def drop(self, request_ids: Collection[int]) -> None:
        """See `EnginePort`."""
        await self._port.drop(request_ids)
