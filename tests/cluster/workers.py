"""Workers to test clusters with: each is named by a factory of this module."""

import asyncio
import os
import signal
import sys
from typing import Any

from tailrace.cluster.base import Worker, WorkerContext
from tailrace.errors import ModelError
from tailrace.events import Event


class Servant(Worker):
    """Runs until it is told to stop, and does as it is told."""

    def __init__(self, settings: bytes, context: WorkerContext) -> None:
        self.settings = settings
        self.context = context
        self.stopped = asyncio.Event()
        self.cancelled: list[str] = []

    async def open(self) -> dict[str, Any]:
        return {"settings": self.settings.decode(), "threads": os.environ.get("OMP_NUM_THREADS", "")}

    async def run(self) -> None:
        await self.stopped.wait()
        self.emit("last")

    async def stop(self) -> None:
        self.stopped.set()

    async def add(self, a: int, b: int) -> int:
        return a + b

    async def fail(self, kind: str) -> None:
        raise ModelError("no such model") if kind == "ours" else KeyError("colour")

    async def tell(self, *tasks: str) -> None:
        for task in tasks:
            self.emit(task)

    def emit(self, task: str) -> None:
        self.context.emit(Event(task=task, actor=self.context.name, start=0.0, end=1.0))

    async def linger(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.append(name)

    async def whose_ended(self) -> list[str]:
        return self.cancelled

    async def say(self, text: str) -> None:
        print(text)

    async def die(self, code: int) -> None:
        """Exit, or by a signal where `code` is negative."""
        print("last words", file=sys.stderr)
        if code < 0:
            os.kill(os.getpid(), -code)
            signal.pause()
        os._exit(code)
