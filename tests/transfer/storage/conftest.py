"""Storages of every kind, small."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.base import Storage
from tailrace.transfer.queue.storage.keyed import KeyedStorage
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.queue.storage.spill import SpillStorage
from tests.transfer.storage.keyed import DictOfBytes
from tests.transfer.storage.machine import MAX_BYTES

Make = Callable[[str], Storage]
"""A function that makes a storage for a queue of that name."""


@pytest.fixture(params=["memory", "arena", "spill", "keyed", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make storages of MAX_BYTES, of each kind in turn."""
    match request.param:
        case "memory":
            return lambda name: MemoryStorage(max_bytes=MAX_BYTES)
        case "arena":
            return lambda name: ArenaStorage(parent=tmp_path, max_bytes=MAX_BYTES, segment_bytes=64)
        case "spill":
            return lambda name: SpillStorage(directory=tmp_path, memory_bytes=48, max_bytes=MAX_BYTES)
        case "keyed":
            return lambda name: KeyedStorage(DictOfBytes(), name=name, max_bytes=MAX_BYTES)
    url = request.getfixturevalue("redis_url")
    from tailrace.transfer.queue.storage.redis import RedisStorage

    return lambda name: RedisStorage(url=url, name=name, timeout_s=10, max_bytes=MAX_BYTES)
