"""Makes an engine without blocking the event loop."""

import asyncio
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from tailrace.config.engine import EngineConfig
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.factory import make_engine


async def open_engine(config: EngineConfig, model_dir: Path, *, device: str, executor: Executor) -> Engine:
    """Make an engine in `executor`. When cancelled meanwhile, close what was made before returning.

    The closing is awaited here. At the executor's end it would block the event loop with its signal handlers.
    """
    make = partial(make_engine, config, EngineArgs(model_dir=model_dir, device=device, executor=executor))
    future = asyncio.get_running_loop().run_in_executor(executor, make)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if future.exception() is None:
            await future.result().close()
        raise
