"""Waking coroutines from a thread."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Bell:
    """Rung when something has changed. Used from any thread and any event loop."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def ring(self) -> None:
        """Have everybody look again."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with suppress(RuntimeError):  # the loop was closed: nobody waits there
                loop.call_soon_threadsafe(event.set)

    async def until(self, look: Callable[[], T | None], *, timeout_s: float = math.inf) -> T | None:
        """What `look` returns as soon as it returns anything; None when that has not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = asyncio.Event()
            entry = (asyncio.get_running_loop(), event)
            with self._lock:
                self._waiting.append(entry)
            try:
                if (found := look()) is not None:
                    return found
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await event.wait()
            except TimeoutError:
                return look()
            finally:
                with self._lock, suppress(ValueError):  # it was rung
                    self._waiting.remove(entry)
