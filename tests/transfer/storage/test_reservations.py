"""Places that an arena gives to clients who write in its memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.arena import ArenaStorage, Place
from tailrace.transfer.queue.storage.base import PartId
from tests.transfer.storage.arena_machine import ArenaMachine
from tests.transfer.storage.machine import MAX_BYTES, run_machine

A, B = PartId(0, 0, 0), PartId(1, 0, 0)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[ArenaStorage]:
    made = ArenaStorage(parent=tmp_path, max_bytes=MAX_BYTES, segment_bytes=64)
    yield made
    made.close()


def write(arena: ArenaStorage, **parts: bytes) -> None:
    """Write parts of the slots 0, 1, … in one call. The names a, b, … stand for the slots."""
    content = b"".join(parts.values())
    place = arena.reserve(len(content))
    arena.memory(place)[:] = content
    arena.commit(place, [(PartId(ord(name) - ord("a"), 0, 0), len(part)) for name, part in parts.items()])


def test_an_arena_is_a_dict_of_parts_whatever_clients_do_in_its_memory(tmp_path: Path) -> None:
    run_machine(lambda: ArenaMachine(tmp_path))


def test_a_full_arena_says_how_full_and_has_room_again_after_a_drop(arena: ArenaStorage) -> None:
    write(arena, a=bytes(40), b=bytes(24))
    with pytest.raises(StorageFull, match=f"a write of {MAX_BYTES - 63} bytes: 64 of {MAX_BYTES} are taken"):
        arena.reserve(MAX_BYTES - 63)
    arena.drop([A, B])
    arena.abandon(arena.reserve(MAX_BYTES))


def test_a_place_that_never_fits_is_refused_and_does_not_wait_for_room(arena: ArenaStorage) -> None:
    with pytest.raises(QueueError, match=f"{MAX_BYTES + 1} bytes can never fit the {MAX_BYTES} .*max_bytes") as refused:
        arena.reserve(MAX_BYTES + 1)
    assert not isinstance(refused.value, StorageFull)


def test_reserved_places_count_as_taken(arena: ArenaStorage) -> None:
    place = arena.reserve(MAX_BYTES)
    with pytest.raises(StorageFull):
        arena.reserve(1)
    arena.abandon(place)
    assert arena.nbytes == 0


def test_a_write_of_a_negative_size_is_refused(arena: ArenaStorage) -> None:
    with pytest.raises(QueueError, match="a write of -1 bytes"):
        arena.reserve(-1)


def test_the_first_write_of_a_part_counts_and_its_retry_frees_its_own_bytes(arena: ArenaStorage) -> None:
    write(arena, a=b"first", b=b"other")
    write(arena, b=b"other", c=b"new")
    assert arena.nbytes == len("firstothernew")
    place = arena.reserve(5)
    arena.memory(place)[:] = b"again"
    with pytest.raises(QueueError, match=r"slot=0, generation=0, tag=0.* is stored already with other bytes"):
        arena.commit(place, [(A, 5)])
    assert bytes(arena.read(A)) == b"first"


@pytest.mark.parametrize("size", [4, 6])
def test_parts_that_do_not_fill_their_place_are_refused(arena: ArenaStorage, size: int) -> None:
    place = arena.reserve(5)
    with pytest.raises(QueueError, match=f"1 parts of {size} bytes in all came in 5 bytes"):
        arena.commit(place, [(A, size)])
    arena.commit(place, [(A, 5)])


def test_a_place_that_was_never_given_out_is_refused(arena: ArenaStorage) -> None:
    reserved = arena.reserve(8)
    for place in (
        Place(99, 0, 8, 99),
        reserved._replace(offset=8),
        reserved._replace(offset=-8),
        reserved._replace(size=2**62),
        reserved._replace(segment=-1),
        reserved._replace(serial=0),
    ):
        with pytest.raises(QueueError, match=r"Place\(.*\) is not reserved"):
            arena.commit(place, [(A, place.size)])


def test_a_late_commit_does_not_meet_another_writers_room(arena: ArenaStorage) -> None:
    late = arena.reserve(MAX_BYTES)
    arena.abandon(late)
    other = arena.reserve(MAX_BYTES)
    with pytest.raises(QueueError, match="is not reserved"):
        arena.commit(late, [(A, MAX_BYTES)])
    arena.commit(other, [(B, MAX_BYTES)])
    assert list(arena.parts()) == [B]


def test_rows_without_bytes_are_stored_and_dropped(arena: ArenaStorage) -> None:
    write(arena, a=b"", b=b"")
    assert sorted(arena.parts()) == [A, B]
    assert bytes(arena.read(A)) == b""
    arena.drop([A])
    with pytest.raises(StaleRowError):
        arena.read(A)
