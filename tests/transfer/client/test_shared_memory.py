import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import PeerLost, WireError
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.client.shared_memory import Memory
from tailrace.transfer.queue.messages import Cells, Done, Reserved, Table, Unit
from tailrace.transfer.queue.storage.arena import ArenaStorage, Place
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.sockets import host_id
from tests.transfer.wire.play import Play
from tests.transfer.wire.rows import packed

KIB = 2**10


def unit_of(directory: Path | str, host: str | None = None) -> Unit:
    return Unit(3, ["ipc:///unit"], host or host_id(), str(directory))


@pytest.fixture
def arena(tmp_path: Path) -> ArenaStorage:
    return ArenaStorage(parent=tmp_path, max_bytes=KIB, segment_bytes=256)


def reserved(arena: ArenaStorage, nbytes: int) -> tuple[Place, Reserved]:
    place = arena.reserve(nbytes)
    return place, Reserved(place.serial, str(place.segment), place.offset)


def pinned(segments: list[str], pin: int) -> Cells:
    return Cells(packed([]), packed([]), segments, pin)


def test_what_is_written_to_a_reserved_place_is_there_in_the_unit(arena: ArenaStorage) -> None:
    memory = Memory(shared=True)
    reserved(arena, 16)
    place, answer = reserved(arena, 8)
    memory.writable(unit_of(arena.directory), answer, 8)[:] = b"abcdefgh"
    assert bytes(arena.memory(place)) == b"abcdefgh"


def test_a_pin_is_due_when_nothing_leads_to_its_memory_any_more(arena: ArenaStorage) -> None:
    memory = Memory(shared=True)
    first, second = arena.reserve(256), arena.reserve(256)
    names = [str(first.segment), str(second.segment)]
    one, two = memory.open(unit_of(arena.directory), pinned(names, 9), [])
    view = np.frombuffer(one[:64], np.int64)[2:4].view(np.float32)[1:]
    del one
    assert (memory.holders, memory.due()) == (["ipc:///unit"], [])
    del two
    assert memory.due() == [], "one segment is still looked at"
    del view
    gc.collect()
    assert memory.due() == [Call("ipc:///unit", Done([9], []))]
    assert (memory.holders, memory.due()) == ([], []), "it is said once"


def test_pins_of_several_answers_are_told_together(arena: ArenaStorage) -> None:
    memory = Memory(shared=True)
    segment = str(arena.reserve(8).segment)
    for pin in (4, 5):
        memory.open(unit_of(arena.directory), pinned([segment], pin), [])
    assert memory.due() == [Call("ipc:///unit", Done([4, 5], []))]


def test_memory_can_be_read_but_not_written(arena: ArenaStorage) -> None:
    memory = Memory(shared=True)
    [shared] = memory.open(unit_of(arena.directory), pinned([str(arena.reserve(8).segment)], 1), [])
    [framed] = memory.open(unit_of(""), Cells(b"", b"", [], None), [bytearray(8)])
    assert (shared.readonly, framed.readonly) == (True, True)


def test_frames_are_not_copied_unless_arrays_in_them_would_not_be_aligned() -> None:
    whole = np.zeros(17, np.uint8)
    [aligned, odd] = Memory(shared=False).open(
        unit_of(""), Cells(b"", b"", [], None), [whole.data[:16], whole.data[1:]]
    )
    whole[:] = 7
    assert (bytes(aligned), bytes(odd)) == (b"\7" * 16, b"\0" * 16)
    assert np.frombuffer(odd, np.int64).flags.aligned


def test_memory_is_shared_on_the_same_host_where_its_directory_is_open(arena: ArenaStorage, tmp_path: Path) -> None:
    memory = Memory(shared=True)
    assert memory.is_shared(unit_of(arena.directory))
    assert not memory.is_shared(unit_of(arena.directory, host="elsewhere"))
    assert not memory.is_shared(unit_of(tmp_path / "gone"))
    assert not memory.is_shared(unit_of("")), "the unit has none"
    assert not Memory(shared=False).is_shared(unit_of(arena.directory))
    assert memory.is_worthwhile(unit_of(arena.directory), 64 * KIB)
    assert not memory.is_worthwhile(unit_of(arena.directory), KIB)


def test_memory_that_is_gone_is_a_lost_unit_and_its_pin_is_given_back(arena: ArenaStorage, tmp_path: Path) -> None:
    memory = Memory(shared=True)
    with pytest.raises(PeerLost, match="the memory of unit 3 is gone with its process"):
        memory.open(unit_of(tmp_path), pinned(["1"], 6), [])
    gc.collect()  # the error's traceback kept a reference to it
    assert memory.due() == [Call("ipc:///unit", Done([6], []))]


def mappings(arena: ArenaStorage) -> int:
    """The number of mappings of the arena's memory in this process, the arena's own included."""
    return Path("/proc/self/maps").read_text().count(str(arena.directory))


def test_the_memory_of_a_unit_that_is_gone_is_unmapped(arena: ArenaStorage) -> None:
    session = Session("controller", shared_memory=True)
    unit = unit_of(arena.directory)
    answer = reserved(arena, 8)[1]
    own = mappings(arena)
    for is_forgotten in (True, False):
        look(session, unit)
        session.memory.writable(unit, answer, 8)
        assert mappings(arena) == own + 1
        if is_forgotten:
            session.directory.forget(unit.number)
        else:
            look(session)
        assert mappings(arena) == own


def look(session: Session, *units: Unit) -> None:
    Play(session.directory.read_table()).answer(Table(list(units), {}, []))


def test_a_segment_that_is_none_and_a_place_outside_of_it_are_refused(arena: ArenaStorage) -> None:
    memory, unit = Memory(shared=True), unit_of(arena.directory)
    with pytest.raises(WireError, match=r"names a segment '\.\./secret'; expected a number"):
        memory.writable(unit, Reserved(1, "../secret", 0), 8)
    with pytest.raises(WireError, match="reserved 512 bytes that lie outside of a segment"):
        memory.writable(unit, Reserved(1, str(arena.reserve(8).segment), 0), 512)


def test_closing_unmaps_only_what_nobody_looks_at(arena: ArenaStorage) -> None:
    memory = Memory(shared=True)
    place, answer = reserved(arena, 8)
    view = np.frombuffer(memory.writable(unit_of(arena.directory), answer, 8), np.uint8)
    gone = weakref.ref(view)
    memory.close()
    arena.memory(place)[:] = b"x" * 8
    assert bytes(view.data) == b"x" * 8
    del view
    assert gone() is None
