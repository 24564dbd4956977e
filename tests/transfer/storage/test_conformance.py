"""The contract of every storage."""

import numpy as np
import pytest

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.base import PartBatch, PartId, Storage
from tests.transfer.storage.conftest import Make
from tests.transfer.storage.machine import MAX_BYTES, StorageMachine, run_machine
from tests.transfer.storage.writing import store

A, B = PartId(0, 0, 0), PartId(1, 0, 0)


def test_a_storage_is_a_dict_of_parts_whatever_is_done_with_it(make: Make) -> None:
    run_machine(lambda: StorageMachine(make))


def write(storage: Storage, **parts: bytes) -> None:
    """Write parts of the slots 0, 1, … in one call. The names a, b, … stand for the slots."""
    store(storage, [(PartId(ord(name) - ord("a"), 0, 0), content) for name, content in parts.items()])


def test_a_full_storage_says_how_full_and_has_room_again_after_a_drop(storage: Storage) -> None:
    write(storage, a=bytes(40), b=bytes(24))
    with pytest.raises(StorageFull, match=f"a write of {MAX_BYTES - 63} bytes: 64 of {MAX_BYTES} are taken"):
        write(storage, c=bytes(MAX_BYTES - 63))
    storage.drop([A, B])
    write(storage, c=bytes(MAX_BYTES))


def test_a_write_that_never_fits_is_refused_and_does_not_wait_for_room(storage: Storage) -> None:
    with pytest.raises(QueueError, match=f"{MAX_BYTES + 1} bytes can never fit the {MAX_BYTES} .*max_bytes") as refused:
        write(storage, a=bytes(MAX_BYTES + 1))
    assert not isinstance(refused.value, StorageFull)


def test_the_first_write_of_a_part_counts_and_its_retry_takes_no_bytes(storage: Storage) -> None:
    write(storage, a=b"first", b=b"other")
    write(storage, b=b"other", c=b"new")
    assert storage.nbytes == len("firstothernew")
    with pytest.raises(QueueError, match=r"slot=0, generation=0, tag=0.* is stored already with other bytes"):
        write(storage, a=b"again")
    assert bytes(storage.read(A)) == b"first"


def test_stored_bytes_are_copies(storage: Storage) -> None:
    content = bytearray(b"cells, outputs")
    store(storage, [(A, memoryview(content)[:5]), (B, memoryview(content)[7:])])
    content[:] = bytes(len(content))
    assert [bytes(memory) for memory in storage.read_many([B, A])] == [b"outputs", b"cells"]


def test_parts_are_stored_all_or_none(storage: Storage) -> None:
    write(storage, b=b"first")
    for parts, error, message in (
        ([(A, bytes(8)), (B, b"other")], QueueError, "stored already with other bytes"),
        ([(A, bytes(8)), (A, bytes(8))], QueueError, "named twice"),
        ([(A, bytes(8)), (PartId(2, 0, 0), bytes(MAX_BYTES - 12))], StorageFull, "no room"),
    ):
        with pytest.raises(error, match=message):
            store(storage, parts)
    assert list(storage.parts()) == [B]
    assert storage.nbytes == 5


def test_parts_of_one_batch_lie_one_after_the_other(storage: Storage) -> None:
    batch = PartBatch([B, A], ["text"], np.array([[5], [7]]), [5, 7])
    storage.store([(batch, memoryview(b"cellsoutputs"))])
    assert (bytes(storage.read(A)), bytes(storage.read(B))) == (b"outputs", b"cells")


@pytest.mark.parametrize("size", [4, 6])
def test_parts_that_do_not_fill_their_memory_are_refused(storage: Storage, size: int) -> None:
    batch = PartBatch([A], ["text"], np.array([[size]]), [size])
    with pytest.raises(QueueError, match=f"1 parts of {size} bytes in all came in 5 bytes"):
        storage.store([(batch, memoryview(b"cells"))])
    assert (list(storage.parts()), storage.nbytes) == ([], 0)


def test_a_storage_finds_nothing_where_there_was_none_before(storage: Storage) -> None:
    assert storage.take_stock() == []


def test_rows_without_bytes_are_stored_and_dropped(storage: Storage) -> None:
    write(storage, a=b"", b=b"")
    assert sorted(storage.parts()) == [A, B]
    assert bytes(storage.read(A)) == b""
    storage.drop([A])
    with pytest.raises(StaleRowError):
        storage.read(A)
