"""Blocking forms of all queues, so that one test holds for asynchronous and for blocking ones."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tailrace.transfer.queue.base import TransferQueue
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.sync_queue import SyncQueue

Face = Any
"""A queue with the methods of `SyncQueue`."""


class Blocking:
    """A queue whose every call blocks. `make` makes the asynchronous queue behind it."""

    def __init__(self, make: Callable[[], TransferQueue]) -> None:
        self._runner = asyncio.Runner()
        self._queue = self._runner.run(_enter(make))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Coroutine[Any, Any, Any]] = getattr(self._queue, name)
        return lambda *args, **options: self._runner.run(method(*args, **options))

    def __enter__(self) -> Face:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(self._queue, RemoteQueue):
            self._runner.run(self._queue.__aexit__(None, None, None))
        self._runner.close()


async def _enter(make: Callable[[], TransferQueue]) -> TransferQueue:
    queue = make()
    return await queue.__aenter__() if isinstance(queue, RemoteQueue) else queue


def remote(address: Any, **options: Any) -> Face:
    """A `RemoteQueue` whose calls block."""
    return Blocking(lambda: RemoteQueue(address, name="tester", **options))


def sync(address: Any, **options: Any) -> Face:
    """A `SyncQueue`, which blocks by itself."""
    return SyncQueue(address, name="tester", **options)
