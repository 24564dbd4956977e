"""What every storage does."""

import pytest

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.base import PartId, Place, Storage
from tests.transfer.storage.conftest import Make
from tests.transfer.storage.machine import MAX_BYTES, StorageMachine, run_machine

A, B = PartId(0, 0, 0), PartId(1, 0, 0)


def test_a_storage_is_a_dict_of_parts_whatever_is_done_with_it(make: Make) -> None:
    run_machine(lambda: StorageMachine(make))


def write(storage: Storage, **parts: bytes) -> None:
    """One write of parts of slots 0, 1, …, by name."""
    content = b"".join(parts.values())
    place = storage.reserve(len(content))
    storage.memory(place)[:] = content
    storage.commit(place, [(PartId(ord(name) - ord("a"), 0, 0), len(part)) for name, part in parts.items()])


def test_a_full_storage_says_how_full_and_has_room_again_after_a_drop(storage: Storage) -> None:
    write(storage, a=bytes(40), b=bytes(24))
    with pytest.raises(StorageFull, match=f"a write of {MAX_BYTES - 63} bytes: 64 of {MAX_BYTES} are taken"):
        storage.reserve(MAX_BYTES - 63)
    storage.drop([A, B])
    storage.abandon(storage.reserve(MAX_BYTES))


def test_a_write_that_never_fits_is_refused_and_does_not_wait_for_room(storage: Storage) -> None:
    with pytest.raises(QueueError, match=f"{MAX_BYTES + 1} bytes can never fit the {MAX_BYTES} .*max_bytes") as refused:
        storage.reserve(MAX_BYTES + 1)
    assert not isinstance(refused.value, StorageFull)


def test_reserved_places_count_as_taken(storage: Storage) -> None:
    place = storage.reserve(MAX_BYTES)
    with pytest.raises(StorageFull):
        storage.reserve(1)
    storage.abandon(place)
    assert storage.nbytes == 0


def test_a_write_of_a_negative_size_is_refused(storage: Storage) -> None:
    with pytest.raises(QueueError, match="a write of -1 bytes"):
        storage.reserve(-1)


def test_the_first_write_of_a_part_counts_and_its_retry_frees_its_own_bytes(storage: Storage) -> None:
    write(storage, a=b"first", b=b"other")
    write(storage, b=b"other", c=b"new")
    assert storage.nbytes == len("firstothernew")
    place = storage.reserve(5)
    storage.memory(place)[:] = b"again"
    with pytest.raises(QueueError, match=r"slot=0, generation=0, tag=0.* is stored already with other bytes"):
        storage.commit(place, [(A, 5)])
    assert bytes(storage.read(A)) == b"first"


def test_stored_bytes_are_copies(storage: Storage) -> None:
    content = bytearray(b"cells, outputs")
    storage.store([(A, memoryview(content)[:5]), (B, memoryview(content)[7:])])
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
            storage.store([(part, memoryview(content)) for part, content in parts])
    assert list(storage.parts()) == [B]
    assert storage.nbytes == 5


@pytest.mark.parametrize("size", [4, 6])
def test_parts_that_do_not_fill_their_place_are_refused(storage: Storage, size: int) -> None:
    place = storage.reserve(5)
    with pytest.raises(QueueError, match=f"1 parts of {size} bytes in all came in 5 bytes"):
        storage.commit(place, [(A, size)])
    storage.commit(place, [(A, 5)])


def test_a_place_that_was_never_given_out_is_refused(storage: Storage) -> None:
    reserved = storage.reserve(8)
    for place in (
        Place(99, 0, 8, 99),
        reserved._replace(offset=8),
        reserved._replace(offset=-8),
        reserved._replace(size=2**62),
        reserved._replace(segment=-1),
        reserved._replace(serial=0),
    ):
        with pytest.raises(QueueError, match=r"Place\(.*\) is not reserved"):
            storage.commit(place, [(A, place.size)])


def test_a_late_commit_does_not_meet_another_writers_room(storage: Storage) -> None:
    late = storage.reserve(MAX_BYTES)
    storage.abandon(late)
    other = storage.reserve(MAX_BYTES)
    with pytest.raises(QueueError, match="is not reserved"):
        storage.commit(late, [(A, MAX_BYTES)])
    storage.commit(other, [(B, MAX_BYTES)])
    assert list(storage.parts()) == [B]


def test_rows_without_bytes_are_stored_and_dropped(storage: Storage) -> None:
    write(storage, a=b"", b=b"")
    assert sorted(storage.parts()) == [A, B]
    assert bytes(storage.read(A)) == b""
    storage.drop([A])
    with pytest.raises(StaleRowError):
        storage.read(A)
