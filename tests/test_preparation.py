"""Starting an engine can be broken off."""

import asyncio
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from tailrace import preparation
from tailrace.config.engine import FakeEngineConfig
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tailrace.engine.base import Engine
from tailrace.errors import ModelError
from tailrace.preparation import open_engine


async def test_cancelled_while_the_engine_starts_the_loop_stays_awake_until_it_is_closed(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, started, may_end, closed = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []

    class Noting(FakeEngine):
        async def close(self) -> None:
            closed.append(self)
            await super().close()

    def make(config: object, model_dir: Path, *, device: str, executor: Executor) -> Engine:
        loop.call_soon_threadsafe(started.set)
        assert may_end.wait(60)
        return Noting(executor=executor, playwright=RandomPlaywright(9))

    monkeypatch.setattr(preparation, "make_engine", make)
    opening = asyncio.create_task(open_engine(FakeEngineConfig(), Path(), device="cpu", executor=executor))
    await started.wait()
    opening.cancel()
    assert await asyncio.wait([opening], timeout=0.01) == (set(), {opening})  # in a loop that runs, so it hears signals
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(closed) == 1


async def test_an_engine_that_cannot_start_says_why(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(config: object, model_dir: Path, *, device: str, executor: Executor) -> Engine:
        raise ModelError("no model")

    monkeypatch.setattr(preparation, "make_engine", make)
    with pytest.raises(ModelError, match="no model"):
        await open_engine(FakeEngineConfig(), Path(), device="cpu", executor=executor)
