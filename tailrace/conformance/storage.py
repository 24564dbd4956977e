"""The contract of every storage of the transfer queue, as tests."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.base import PartBatch, PartId, Storage

A, B, C = (PartId(slot, 0, 0) for slot in range(3))


def store(storage: Storage, *parts: tuple[PartId, bytes | memoryview]) -> None:
    """Store parts in one write, each in a batch of its own."""
    storage.store(
        [(PartBatch([part], ["text"], np.array([[len(it)]]), [len(it)]), memoryview(it)) for part, it in parts]
    )


class StorageContract(ABC):
    """Subclass it and define `make`. Every test is a promise of `tailrace.transfer.queue.storage.base.Storage`."""

    max_bytes = 256
    """The bytes of the storages under test; 256 or more."""

    @abstractmethod
    def make(self, name: str, directory: Path) -> Storage:
        """Make a new storage of `max_bytes`. `directory`: for its files, if it has some."""

    @pytest.fixture
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
        """A storage under test."""
        made = self.make(request.node.name, tmp_path)
        yield made
        made.close()

    def test_a_full_storage_says_how_full_and_has_room_again_after_a_drop(self, storage: Storage) -> None:
        """`store` names the room that is missing, and succeeds after `drop` has made it."""
        store(storage, (A, bytes(40)), (B, bytes(24)))
        more = self.max_bytes - 63
        with pytest.raises(StorageFull, match=f"a write of {more} bytes: 64 of {self.max_bytes} are taken"):
            store(storage, (C, bytes(more)))
        storage.drop([A, B])
        store(storage, (C, bytes(self.max_bytes)))

    def test_a_write_that_never_fits_is_refused_and_does_not_wait_for_room(self, storage: Storage) -> None:
        """`store` raises no `StorageFull` for what no storage of this size can hold."""
        more = self.max_bytes + 1
        with pytest.raises(QueueError, match=f"{more} bytes can never fit the {self.max_bytes} .*max_bytes") as refused:
            store(storage, (A, bytes(more)))
        assert not isinstance(refused.value, StorageFull)

    def test_the_first_write_of_a_part_counts_and_its_retry_takes_no_bytes(self, storage: Storage) -> None:
        """`store` keeps what a part had at first, and refuses other bytes."""
        store(storage, (A, b"first"), (B, b"other"))
        store(storage, (B, b"other"), (C, b"new"))
        assert storage.nbytes == len("firstothernew")
        with pytest.raises(QueueError, match=r"slot=0, generation=0, tag=0.* is stored already with other bytes"):
            store(storage, (A, b"again"))
        assert bytes(storage.read(A)) == b"first"

    def test_stored_bytes_are_copies_and_read_only(self, storage: Storage) -> None:
        """`read` gives the bytes of the time of `store`, whatever becomes of the memory."""
        content = bytearray(b"cells, outputs")
        store(storage, (A, memoryview(content)[:5]), (B, memoryview(content)[7:]))
        content[:] = bytes(len(content))
        found = storage.read_many([B, A])
        assert [bytes(memory) for memory in found] == [b"outputs", b"cells"]
        assert all(memory.readonly for memory in found)

    def test_parts_are_stored_all_or_none(self, storage: Storage) -> None:
        """`store` that fails changes nothing."""
        store(storage, (B, b"first"))
        large = bytes(self.max_bytes - 12)
        with pytest.raises(QueueError, match="stored already with other bytes"):
            store(storage, (A, bytes(8)), (B, b"other"))
        with pytest.raises(QueueError, match="named twice"):
            store(storage, (A, bytes(8)), (A, bytes(8)))
        with pytest.raises(StorageFull, match="no room"):
            store(storage, (A, bytes(8)), (C, large))
        assert list(storage.parts()) == [B]
        assert storage.nbytes == 5

    def test_parts_of_one_batch_lie_one_after_the_other(self, storage: Storage) -> None:
        """`store` cuts the memory of a batch by the sizes of its parts."""
        batch = PartBatch([B, A], ["text"], np.array([[5], [7]]), [5, 7])
        storage.store([(batch, memoryview(b"cellsoutputs"))])
        assert (bytes(storage.read(A)), bytes(storage.read(B))) == (b"outputs", b"cells")

    @pytest.mark.parametrize("size", [4, 6])
    def test_parts_that_do_not_fill_their_memory_are_refused(self, storage: Storage, size: int) -> None:
        """`store` refuses sizes that do not add up to the memory."""
        batch = PartBatch([A], ["text"], np.array([[size]]), [size])
        with pytest.raises(QueueError, match=f"1 parts of {size} bytes in all came in 5 bytes"):
            storage.store([(batch, memoryview(b"cells"))])
        assert (list(storage.parts()), storage.nbytes) == ([], 0)

    def test_a_storage_finds_nothing_where_there_was_none_before(self, storage: Storage) -> None:
        """`take_stock` of a new name is empty."""
        assert storage.take_stock() == []

    def test_rows_without_bytes_are_stored_and_dropped(self, storage: Storage) -> None:
        """`store`, `read` and `drop` know parts of no bytes."""
        store(storage, (A, b""), (B, b""))
        assert sorted(storage.parts()) == [A, B]
        assert bytes(storage.read(A)) == b""
        storage.drop([A])
        with pytest.raises(StaleRowError):
            storage.read(A)

    def test_what_was_dropped_is_gone_and_may_be_dropped_again(self, storage: Storage) -> None:
        """`drop` is harmless for what is not stored."""
        store(storage, (A, b"cells"), (B, b"outputs"))
        assert A in storage
        storage.drop([A, A, C])
        storage.drop([A])
        assert A not in storage
        assert list(storage.parts()) == [B]
        assert storage.nbytes == 7
        with pytest.raises(StaleRowError, match="not stored"):
            storage.read_many([B, A])
