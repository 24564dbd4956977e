"""Every storage keeps the contract, and is a dict of parts whatever a random user does with it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.conformance.storage import A, B, StorageContract, store
from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.base import Storage
from tailrace.transfer.queue.storage.keyed import KeyedStorage
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.queue.storage.spill import SpillStorage
from tests.transfer.storage.conftest import Make
from tests.transfer.storage.keyed import DictOfBytes
from tests.transfer.storage.machine import MAX_BYTES, StorageMachine, run_machine


def test_a_storage_is_a_dict_of_parts_whatever_is_done_with_it(make: Make) -> None:
    run_machine(lambda: StorageMachine(make))


class TestMemory(StorageContract):
    def make(self, name: str, directory: Path) -> Storage:
        return MemoryStorage(max_bytes=MAX_BYTES)


class TestArena(StorageContract):
    def make(self, name: str, directory: Path) -> Storage:
        return ArenaStorage(parent=directory, max_bytes=MAX_BYTES, segment_bytes=64)


class TestSpill(StorageContract):
    def make(self, name: str, directory: Path) -> Storage:
        return SpillStorage(directory=directory, memory_bytes=48, max_bytes=MAX_BYTES)


class TestKeyed(StorageContract):
    def make(self, name: str, directory: Path) -> Storage:
        return KeyedStorage(DictOfBytes(), name=name, max_bytes=MAX_BYTES)


class TestRedis(StorageContract):
    url: str

    @pytest.fixture(autouse=True)
    def _server(self, redis_url: str) -> None:
        self.url = redis_url

    def make(self, name: str, directory: Path) -> Storage:
        from tailrace.transfer.queue.storage.redis import RedisStorage

        return RedisStorage(url=self.url, name=name, timeout_s=10, max_bytes=MAX_BYTES)


def test_what_a_store_of_bytes_has_lost_is_stale_and_takes_no_room() -> None:
    keyed = DictOfBytes()
    storage = KeyedStorage(keyed, name="queue", max_bytes=MAX_BYTES)
    store(storage, (A, b"cells"), (B, b"outputs"))
    keyed.remove(["queue:0:0:0"])
    with pytest.raises(StaleRowError, match="slot=0"):
        storage.read_many([B, A])
    assert list(storage.parts()) == [B]
    assert storage.nbytes == 7


@pytest.mark.parametrize("error", [StorageFull("no room"), QueueError("the store has failed")])
def test_a_write_that_a_store_of_bytes_breaks_off_leaves_nothing(error: QueueError) -> None:
    class BreaksOff(DictOfBytes):
        def put(self, items: Sequence[tuple[str, memoryview]]) -> None:
            super().put(items[:1])
            raise error

    keyed = BreaksOff()
    storage = KeyedStorage(keyed, name="queue", max_bytes=MAX_BYTES)
    with pytest.raises(type(error)):
        store(storage, (A, b"cells"), (B, b"outputs"))
    assert (list(storage.parts()), storage.nbytes, keyed.items) == ([], 0, {})


def test_an_ended_storage_leaves_nothing_in_a_store_of_bytes() -> None:
    keyed = DictOfBytes()
    storage = KeyedStorage(keyed, name="queue", max_bytes=MAX_BYTES)
    store(storage, (A, b"cells"))
    storage.close()
    assert keyed.items == {}
