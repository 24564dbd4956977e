"""The worker of an engine that belongs to no run: `tailrace serve` has some, with the weights of a directory."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from tailrace.activity import Activity
from tailrace.cluster.base import WorkerContext, WorkerSpec
from tailrace.config.cluster import PoolConfig
from tailrace.config.generate import ServeConfig
from tailrace.engine.factory import make_backend
from tailrace.engine.opening import open_engine
from tailrace.events import EventLog
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.local import LocalPort
from tailrace.run.workers.port import PortWorker


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker is told."""

    config: str
    """A ServeConfig as JSON."""
    model_dir: str


def engine_worker(name: str, pool: PoolConfig, config: ServeConfig, model_dir: Path) -> WorkerSpec:
    """Return the specification of a worker with an engine; `pool` says what it reserves."""
    settings = EngineSettings(config=config.model_dump_json(), model_dir=str(model_dir.resolve()))
    return WorkerSpec(
        name=name,
        pool=pool,
        factory=f"{EngineWorker.__module__}:{EngineWorker.__qualname__}",
        settings=msgspec.msgpack.encode(settings),
    )


async def open_port(
    config: ServeConfig, model_dir: Path, log: EventLog, stack: AsyncExitStack, *, name: str
) -> LocalPort:
    """Load an engine, and return its port; `stack` closes both."""
    from tailrace.host.compute import prepare_torch

    prepare_torch(config.device, config.threads)
    thread = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="device"))
    engine = await open_engine(config.engine, model_dir, device=config.device, executor=thread)
    stack.push_async_callback(engine.close)
    facts = EngineFacts(room=make_backend(config.engine).capacity, continues=engine.continues, cache=engine.cache_form)
    port = LocalPort(engine, facts, log=log, activity=Activity(log, "engine"), name=name)
    stack.push_async_callback(port.close)
    return port


class EngineWorker(PortWorker):
    """Serves an engine until it is closed."""

    def __init__(self, settings: bytes, context: WorkerContext) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=EngineSettings)
        self._name = context.name
        self._log = EventLog(sinks=(context.emit,), worker=context.name)
        self._stack = AsyncExitStack()

    async def open(self) -> dict[str, Any]:
        """Load the engine."""
        config = ServeConfig.model_validate_json(self._settings.config)
        model_dir = Path(self._settings.model_dir)
        self._port = await open_port(config, model_dir, self._log, self._stack, name=self._name)
        return {}

    async def run(self) -> None:
        """Wait: there is nothing to do but to answer calls."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """See `Worker`."""
        await self._stack.aclose()
