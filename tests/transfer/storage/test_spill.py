import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tailrace.errors import QueueError, StorageFull
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.queue.storage.spill import SpillStorage
from tests.transfer.storage.writing import store

A, B, C = (PartId(slot, 0, 0) for slot in range(3))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SpillStorage]:
    """A storage with 100 bytes in memory, and 1000 in all."""
    spill = SpillStorage(directory=tmp_path, memory_bytes=100, max_bytes=1000)
    yield spill
    spill.close()


def write(storage: SpillStorage, part: PartId, content: bytes) -> None:
    store(storage, [(part, content)])


def on_disk(directory: Path) -> bytes:
    """The contents of this process's nameless files in `directory`."""
    ours = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it, or this listing was it
            if os.readlink(path).startswith(f"{directory}/"):
                ours.append(int(path.name))
    return b"".join(os.pread(file, os.fstat(file).st_size, 0) for file in ours)


def test_what_is_beyond_the_budget_is_on_disk_the_least_recently_written_first(
    storage: SpillStorage, tmp_path: Path
) -> None:
    for part, letter in ((A, b"a"), (B, b"b"), (C, b"c")):
        write(storage, part, letter * 50)
    storage.read(A)
    assert on_disk(tmp_path) == b"a" * 50
    write(storage, PartId(3, 0, 0), b"d")
    assert on_disk(tmp_path) == b"a" * 50 + b"b" * 50
    assert [storage.read(part) for part in (A, B, C)] == [letter * 50 for letter in (b"a", b"b", b"c")]


def test_a_write_larger_than_the_budget_goes_to_the_file(storage: SpillStorage, tmp_path: Path) -> None:
    write(storage, A, b"a" * 500)
    assert on_disk(tmp_path) == storage.read(A) == b"a" * 500


def test_the_file_has_no_name_and_ends_with_the_storage(tmp_path: Path) -> None:
    storage = SpillStorage(directory=tmp_path, memory_bytes=1, max_bytes=1000)
    write(storage, A, b"a" * 500)
    assert list(tmp_path.iterdir()) == []
    storage.close()
    assert on_disk(tmp_path) == b""


def test_freed_runs_of_the_file_are_used_again(storage: SpillStorage, tmp_path: Path) -> None:
    for index in range(20):
        write(storage, A, bytes([index]) * 400)
        write(storage, B, bytes([index]) * 300)
        storage.drop([A])
        write(storage, C, bytes([index]) * 400)
        assert storage.read(C) == bytes([index]) * 400
        storage.drop([B, C])
    assert len(on_disk(tmp_path)) == 700
    assert storage.nbytes == 0


def test_a_full_disk_fails_the_write_and_leaves_everything_as_it_was(
    storage: SpillStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(storage, A, b"a" * 50)
    large = [(B, b"b" * 250), (C, b"c" * 250)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_room)
        with pytest.raises(StorageFull, match=r"bytes cannot be written to the file in .*: No space left on device"):
            store(storage, large)
    assert list(storage.parts()) == [A]
    assert storage.nbytes == 50
    store(storage, large)
    assert storage.read(A) == b"a" * 50
    assert len(on_disk(tmp_path)) == 550


def test_a_full_disk_makes_a_full_storage(storage: SpillStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    write(storage, A, b"a" * 50)
    monkeypatch.setattr(os, "pwrite", no_room)
    with pytest.raises(StorageFull, match="50 bytes cannot be written"):
        write(storage, C, b"c" * 51)
    assert storage.nbytes == 50
    write(storage, B, b"b" * 50)
    assert storage.read(A) == b"a" * 50


def no_room(file: int, content: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_the_system_does_in_pieces_is_whole(
    storage: SpillStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: pwrite(file, content[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:5]], offset))
    content = bytes(range(200))
    write(storage, A, content)
    assert storage.read(A) == content


def test_no_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match=r"cannot spill to .*missing: No such file or directory"):
        SpillStorage(directory=tmp_path / "missing", memory_bytes=1, max_bytes=1)
