"""The workers of these tests. Each is named by a factory of this module."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailrace.cluster.base import Worker, WorkerContext
from tailrace.errors import ModelError
from tailrace.events import Event


class UserModelError(ModelError):
    """An error that pickle cannot restore."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"{model}: {problem}")


class Alone(Worker):
    """A worker that cannot open while another of its process opens."""

    opening = 0

    def __init__(self, settings: bytes, context: WorkerContext) -> None:
        pass

    async def open(self) -> dict[str, Any]:
        Alone.opening += 1
        await asyncio.sleep(0)
        alone = Alone.opening == 1
        Alone.opening -= 1
        if not alone:
            raise ModelError("another opens")
        return {}

    async def run(self) -> None:
        pass

    async def stop(self) -> None:
        pass


class Servant(Worker):
    """A worker that runs until it is told to stop, and does as it is told."""

    def __init__(self, settings: bytes, context: WorkerContext) -> None:
        self.settings = settings
        self.context = context
        self.stopped = asyncio.Event()
        self.ended = asyncio.Event()
        self.begun: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.cancelled: list[str] = []

    async def open(self) -> dict[str, Any]:
        return {"settings": self.settings.decode()}

    async def run(self) -> None:
        try:
            await self.stopped.wait()
            self.emit("last")
        finally:
            self.ended.set()

    async def stop(self) -> None:
        self.stopped.set()

    async def stopped_by_now(self) -> bool:
        return await self.stopped.wait()

    async def run_has_ended(self) -> None:
        await self.ended.wait()

    async def add(self, a: int, b: int) -> int:
        return a + b

    async def fail(self, kind: str) -> None:
        errors = {
            "ours": ModelError("no such model"),
            "a user's": UserModelError("7B", "no such model"),
            "another": KeyError("colour"),
        }
        raise errors.get(kind, ValueError("one\ntwo\n"))

    async def tell(self, *tasks: str) -> None:
        for task in tasks:
            self.emit(task)

    def emit(self, task: str) -> None:
        self.context.emit(Event(task=task, actor=self.context.name, start=0.0, end=1.0))

    async def babble(self, is_done: bool) -> None:
        """Emit an event that cannot be encoded."""
        self.context.emit(Event(task="babble", actor=self.context.name, start=0.0, end=1.0, info={"what": object()}))
        if not is_done:
            await asyncio.Event().wait()

    async def linger(self, name: str) -> None:
        self.begun[name].set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.append(name)

    async def commit(self, name: str) -> None:
        """Do as `linger`, but outlast every cancellation."""
        lingering = asyncio.ensure_future(self.linger(name))
        while not lingering.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([lingering])

    async def has_begun(self, name: str) -> None:
        await self.begun[name].wait()

    async def whose_ended(self) -> list[str]:
        return self.cancelled

    async def say(self, text: str) -> None:
        print(text)

    async def say_otherwise(self, text: str) -> None:
        """Print from C, and from a child process."""
        ctypes.CDLL(None).puts(f"C: {text}".encode())
        ctypes.CDLL(None).fflush(None)
        subprocess.run(["echo", f"child: {text}"], check=True, timeout=10)

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    async def start_child(self) -> int:
        """Start a process that hides: it has a session of its own, and its parent is gone."""
        code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
        command = [sys.executable, "-c", code]
        return int(await asyncio.to_thread(subprocess.check_output, command, start_new_session=True, timeout=20))

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def stand_still(self) -> None:
        """Block the event loop."""
        time.sleep(600)

    async def die(self, code: int) -> None:
        """Exit with `code`, or die of the signal `-code` if `code` is negative."""
        print("last words", file=sys.stderr)
        if code < 0:
            os.kill(os.getpid(), -code)
            signal.pause()
        os._exit(code)


class Failing(Servant):
    """A worker whose `run` fails."""

    async def run(self) -> None:
        raise ModelError("cannot go on")


class Unopened(Servant):
    """A worker whose `open` fails."""

    async def open(self) -> dict[str, Any]:
        raise ModelError("no weights")


class Marking(Unopened):
    """A worker whose `open` fails. Its `close` makes the file that its settings name."""

    async def close(self) -> None:
        Path(self.settings.decode()).touch()


class Unclosed(Servant):
    """A worker whose `close` fails."""

    async def close(self) -> None:
        raise ModelError("not saved")


class Stuck(Servant):
    """A worker whose `close` hangs."""

    async def close(self) -> None:
        print("closing")
        await self.stand_still()


class Slow(Servant):
    """A worker whose `close` ends when a byte comes through the pipe that its settings name."""

    async def close(self) -> None:
        with open(self.settings, "rb", buffering=0) as pipe:
            await asyncio.to_thread(pipe.read, 1)
        print("closed")


class Endless(Servant):
    """A worker whose `open` does not end."""

    async def open(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}


class Fragile(Servant):
    """A worker that dies while it opens."""

    async def open(self) -> dict[str, Any]:
        print("no memory left")
        os._exit(3)
