"""Callers that wait in one event loop for the transfer queue: in lines, which wake only the head, or at a gate.

Neither limits a wait. The caller limits it, with `asyncio.timeout`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tailrace.errors import QueueClosed
from tailrace.types import WeightVersion

T = TypeVar("T")


class AsyncLine:
    """Callers that wait for their turn, first come, first served."""

    def __init__(self) -> None:
        self._turns: deque[asyncio.Event] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._turns)

    async def wait(self, attempt: Callable[[], T | None]) -> T:
        """Try `attempt` as the head of the line, again after each `call`, until it returns a result other than None.

        `attempt` runs in the caller's own task, and nothing is awaited after it has succeeded: a cancelled caller got
        nothing.
        """
        turn = asyncio.Event()
        self._turns.append(turn)
        try:
            while True:
                if self._closed:
                    raise QueueClosed("the queue was closed")
                if self._turns[0] is turn and (result := attempt()) is not None:
                    return result
                turn.clear()
                await turn.wait()
        finally:
            self._turns.remove(turn)
            self.call()

    def call(self) -> None:
        """Wake the head of the line; called when something may have changed for it."""
        if self._turns:
            self._turns[0].set()

    def close(self) -> None:
        """Send all waiting and later callers away with QueueClosed."""
        self._closed = True
        for turn in self._turns:
            turn.set()


class VersionGate:
    """Callers that wait for a weight version. None of them waits behind another."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, WeightVersion] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> WeightVersion:
        """The earliest version that a caller waits for."""
        return min(self._waiting.values())

    async def wait(self, version: WeightVersion) -> None:
        """Wait until the gate opens for `version`."""
        opened = asyncio.Event()
        self._waiting[opened] = version
        try:
            await opened.wait()
        finally:
            del self._waiting[opened]

    def open(self, version: WeightVersion | None) -> None:
        """Let through all callers that wait for `version` or an older one; with None, all callers."""
        for opened, needed in self._waiting.items():
            if version is None or needed <= version:
                opened.set()
