"""Directories of killed processes are recognized by their locks, and files exist as a whole or not at all."""

import errno
import fcntl
import os
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.transfer import shared_files


def test_a_directory_is_removed_when_its_process_is_gone_and_not_before(tmp_path: Path) -> None:
    directory, lock = shared_files.make_directory(tmp_path)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert shared_files.lock_directory(directory) is None, "it is this process's"
    shared_files.remove_orphans(tmp_path)
    assert directory.exists()
    os.close(lock)
    shared_files.remove_orphans(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_may_enter_is_neither_locked_nor_removed(tmp_path: Path) -> None:
    directory = tmp_path / f"{shared_files.MEMORY_PREFIX}open"
    directory.mkdir(mode=0o755)
    assert shared_files.lock_directory(directory) is None
    shared_files.remove_orphans(tmp_path)
    assert directory.exists()


def test_a_directory_that_took_the_place_of_the_locked_one_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "directory"
    directory.mkdir(mode=0o700)
    lock = fcntl.flock

    def replace_and_lock(file: int, operation: int) -> None:
        directory.rename(tmp_path / "before")
        directory.mkdir(mode=0o700)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    assert shared_files.lock_directory(directory) is None


@pytest.mark.parametrize("at_once", [False, True])
def test_a_file_is_mapped_as_a_whole_and_shared(tmp_path: Path, at_once: bool) -> None:
    ours = shared_files.map_new(tmp_path / "file", 5000)
    file = os.open(tmp_path / "file", os.O_RDWR)
    theirs = shared_files.map_file(file, at_once=at_once)
    os.close(file)
    with closing(ours.obj), closing(theirs.obj), ours, theirs:  # type: ignore[type-var]
        assert len(ours) == len(theirs) == 5000
        ours[4999] = 7
        assert theirs[4999] == 7


def test_a_file_without_room_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for make in (shared_files.make_file, shared_files.map_new):
        with pytest.raises(OSError, match="No space left"):
            make(tmp_path / "file", 5000)
        assert list(tmp_path.iterdir()) == []
