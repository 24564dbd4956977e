import errno
import json
import mmap
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.arena import ArenaStorage, ArenaView, Place
from tailrace.transfer.queue.storage.base import PartId
from tests.transfer.storage.views import view_of

ROOT = Path(__file__).parents[3]
SEGMENT = 1024
A, B, C = (PartId(slot, 0, 0) for slot in range(3))


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[ArenaStorage]:
    """An arena of four segments of 1 KiB."""
    storage = arena_in(tmp_path)
    yield storage
    storage.close()


def arena_in(parent: Path, **changes: int) -> ArenaStorage:
    return ArenaStorage(parent=parent, **{"max_bytes": 4 * SEGMENT, "segment_bytes": SEGMENT, **changes})


def write(arena: ArenaStorage, part: PartId, content: bytes) -> Place:
    place = arena.reserve(len(content))
    arena.memory(place)[:] = content
    arena.commit(place, [(part, len(content))])
    return place


def segments(arena: ArenaStorage) -> list[str]:
    return sorted(path.name for path in arena.directory.iterdir())


def run(script: str, *arguments: object) -> str:
    """Run `script` in another process, and return what it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


CLIENT = """
import json, sys
from pathlib import Path
from tailrace.transfer.queue.storage.arena import ArenaView
from tailrace.transfer.queue.storage.arena import Place
view = ArenaView(Path(sys.argv[1]))
mine, theirs = (Place(*place) for place in json.loads(sys.argv[2]))
view.segment(mine.segment)[mine.offset : mine.offset + mine.size] = b"from the client"
print(bytes(view.segment(theirs.segment)[theirs.offset : theirs.offset + theirs.size]).decode())
"""


def test_a_client_in_another_process_writes_and_reads_in_place(arena: ArenaStorage) -> None:
    write(arena, A, b"from the unit")
    place = arena.reserve(len(b"from the client"))
    printed = run(CLIENT, arena.directory, json.dumps([place, *arena.places([A])]))
    arena.commit(place, [(B, place.size)])
    assert printed == "from the unit\n"
    assert bytes(arena.read(B)) == b"from the client"


def test_the_directory_is_private_and_gone_when_the_arena_is_closed(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    write(arena, A, b"cells")
    assert stat.S_IMODE(arena.directory.stat().st_mode) == 0o700
    arena.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_an_arena_whose_directory_was_removed_ends_like_any_other(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    write(arena, A, b"cells")
    shutil.rmtree(arena.directory)
    arena.drop([A])
    for _ in range(2):
        arena.trim()
    arena.close()


def test_what_is_looked_at_outlives_the_arena(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    write(arena, A, b"cells")
    view = ArenaView(arena.directory)
    seen = [arena.read(A), *(view_of(view, place) for place in arena.places([A]))]
    arena.close()
    view.close()
    assert seen == [b"cells", b"cells"]


DEAD_UNIT = """
import os, sys
from pathlib import Path
from tailrace.transfer.queue.storage.arena import ArenaStorage
arena = ArenaStorage(parent=Path(sys.argv[1]), max_bytes=4096)
arena.reserve(1)
print(arena.directory, flush=True)
os._exit(1)
"""


def test_a_unit_removes_what_a_dead_one_left_and_nothing_else(tmp_path: Path, arena: ArenaStorage) -> None:
    (tmp_path / "tailrace-queue-notes.txt").write_text("a file")
    (tmp_path / "tailrace-queue-link").symlink_to(tmp_path)
    unit = subprocess.run(
        [sys.executable, "-c", DEAD_UNIT, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert unit.returncode == 1, unit.stderr
    orphan = Path(unit.stdout.strip())
    assert (orphan / "1").exists()
    before = set(tmp_path.iterdir())
    other = arena_in(tmp_path)
    assert set(tmp_path.iterdir()) == before - {orphan} | {other.directory}
    other.close()


def test_no_directory_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match=r"can be made in .*missing: No such file or directory"):
        arena_in(tmp_path / "missing")


def test_rows_dropped_one_by_one_give_back_room_for_one_large_write(arena: ArenaStorage) -> None:
    place = arena.reserve(SEGMENT)
    parts = [PartId(slot, 0, 0) for slot in range(SEGMENT // 16)]
    arena.commit(place, [(part, 16) for part in parts])
    for part in parts[::2] + parts[1::2]:
        arena.drop([part])
    again = arena.reserve(SEGMENT)
    assert again[:3] == place[:3]


def test_a_freed_segment_is_used_again(arena: ArenaStorage) -> None:
    for _ in range(10):
        write(arena, A, bytes(SEGMENT))
        arena.drop([A])
    assert segments(arena) == ["1"]


def test_no_more_empty_segments_than_must_make_room_for_a_larger_one(arena: ArenaStorage) -> None:
    kept = write(arena, A, b"kept")
    for part in (B, C):
        write(arena, part, bytes(SEGMENT))
    arena.drop([B, C])
    assert arena.reserve(2 * SEGMENT).segment == 4
    assert segments(arena) == [str(kept.segment), "3", "4"]
    assert bytes(arena.read(A)) == b"kept"


def test_an_arena_whose_free_bytes_do_not_lie_together_is_full_and_loses_nothing(arena: ArenaStorage) -> None:
    parts = [PartId(slot, 0, 0) for slot in range(8)]
    for part in parts:
        write(arena, part, bytes(SEGMENT // 2))
    arena.drop(parts[::2])
    with pytest.raises(StorageFull, match=f"that lie together: {2 * SEGMENT} of {4 * SEGMENT} are taken"):
        arena.reserve(SEGMENT)
    assert len(segments(arena)) == 4
    assert arena.reserve(SEGMENT // 2).size == SEGMENT // 2


def test_a_client_maps_the_segment_that_took_the_place_of_others(arena: ArenaStorage) -> None:
    view = ArenaView(arena.directory)
    view.segment(write(arena, A, bytes(SEGMENT)).segment)
    arena.drop([A])
    place = arena.reserve(4 * SEGMENT)
    view_of(view, place)[:4] = b"here"
    assert bytes(arena.memory(place)[:4]) == b"here"
    with pytest.raises(QueueError, match="segment 1 of the arena cannot be opened"):
        view.segment(1)


def test_a_pinned_part_keeps_its_memory_until_the_last_unpin(arena: ArenaStorage) -> None:
    write(arena, A, b"a" * 4 * SEGMENT)
    first, second = arena.pin([A]), arena.pin([A, A])
    arena.drop([A])
    with pytest.raises(StaleRowError):
        arena.pin([A])
    for pin in (first, second):
        with pytest.raises(StorageFull):
            arena.reserve(1)
        arena.unpin(pin)
    assert arena.reserve(4 * SEGMENT).segment == 1


def test_a_part_that_comes_again_is_not_mistaken_for_the_pinned_one(arena: ArenaStorage) -> None:
    write(arena, A, b"old")
    (old,) = arena.places([A])
    pin = arena.pin([A])
    arena.drop([A])
    write(arena, A, b"new")
    view = ArenaView(arena.directory)
    assert bytes(view_of(view, old)) == b"old"
    arena.unpin(pin)
    assert bytes(arena.read(A)) == b"new"
    assert arena.nbytes == 3


def test_a_pin_of_a_part_that_is_gone_pins_nothing(arena: ArenaStorage) -> None:
    write(arena, A, b"cells")
    with pytest.raises(StaleRowError):
        arena.pin([A, B])
    arena.drop([A])
    assert arena.nbytes == 0


def failing(code: int) -> Callable[..., None]:
    """A system call that fails with the error `code`."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_machine_without_room_is_an_error_when_the_segment_is_made(
    arena: ArenaStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(StorageFull, match=r"^10 bytes of shared memory cannot be had in .*No space left"):
            arena.reserve(10)
    assert segments(arena) == []
    arena.abandon(arena.reserve(4 * SEGMENT))


def test_a_segment_that_cannot_be_mapped_leaves_nothing(arena: ArenaStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", failing(errno.ENOMEM))
        with pytest.raises(StorageFull, match=r"^10 bytes of shared memory cannot be had in .*Cannot allocate memory"):
            arena.reserve(10)
    assert segments(arena) == []
    assert list(arena.directory.iterdir()) == []
    arena.abandon(arena.reserve(10))


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Bound the bytes of all files below `tmp_path`."""

    def bound(limit: int) -> None:
        def allocate(file: int, offset: int, size: int) -> None:
            taken = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
            if taken + size > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.truncate(file, size)

        monkeypatch.setattr(os, "posix_fallocate", allocate)

    return bound


def test_what_is_free_is_used_where_there_is_no_room_for_a_whole_segment(
    arena: ArenaStorage, room: Callable[[int], None]
) -> None:
    room(SEGMENT // 2 + 64)
    for number in range(9):
        write(arena, PartId(number, 0, 0), bytes([number]) * 64)
    sizes = [(arena.directory / name).stat().st_size for name in segments(arena)]
    assert sizes == [SEGMENT // 2, 64]
    assert [bytes(arena.read(part))[63] for part in arena.parts()] == [*range(9)]
    with pytest.raises(StorageFull, match=r"^64 bytes of shared memory cannot be had"):
        arena.reserve(64)


def test_small_segments_that_are_empty_make_room_for_a_larger_write(
    arena: ArenaStorage, room: Callable[[int], None]
) -> None:
    room(SEGMENT // 2 + 64)
    parts = [PartId(number, 0, 0) for number in range(9)]
    for part in parts:
        write(arena, part, bytes(64))
    arena.drop(parts)
    write(arena, A, bytes(SEGMENT // 2 + 64))
    assert segments(arena) == ["3"]


def test_half_of_what_is_free_is_left_to_other_units(arena: ArenaStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs(arena.directory)
    values = list(free)
    values[1], values[4] = 1, SEGMENT  # the bytes of a block, and the number of free blocks
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    arena.reserve(10)
    arena.reserve(SEGMENT * 3 // 4)
    sizes = [(arena.directory / name).stat().st_size for name in segments(arena)]
    assert sizes == [SEGMENT // 2, SEGMENT * 3 // 4]


@pytest.mark.parametrize(("total", "error"), [(9, QueueError), (10, StorageFull), (0, StorageFull)])
def test_a_machine_that_never_has_room_for_a_write_says_so(
    arena: ArenaStorage, monkeypatch: pytest.MonkeyPatch, total: int, error: type[QueueError]
) -> None:
    values = list(os.statvfs(arena.directory))
    values[1], values[2], values[4] = 1, total, min(total, 3)  # block bytes, blocks, free blocks
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(QueueError, match=f"{values[4]} of {total} bytes are free .* --shm-size") as refused:
        arena.reserve(10)
    assert type(refused.value) is error


def test_memory_that_nobody_has_used_since_the_last_trim_goes_back_though_a_client_has_it_mapped() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        arena = arena_in(Path(shared), segment_bytes=2**16, max_bytes=2**20)
        for part in (A, B, C):
            write(arena, part, bytes(2**16))
        view = ArenaView(arena.directory)
        unlinked = os.open(arena.directory / "1", os.O_RDONLY)
        seen = view.segment(1)
        arena.drop([A, C])
        arena.trim()
        assert segments(arena) == ["1", "2", "3"], "they have only just become empty"
        write(arena, C, bytes(2**16))
        arena.drop([C])
        arena.trim()
        used = segments(arena)
        assert used in (["1", "2"], ["2", "3"]), "one was used meanwhile"
        arena.trim()
        assert segments(arena) == ["2"]
        assert os.fstat(unlinked).st_blocks == 0
        assert len(seen) == 2**16
        os.close(unlinked)
        assert bytes(arena.read(B)) == bytes(2**16)
        write(arena, A, b"again")
        assert bytes(arena.read(A)) == b"again"
        arena.close()
