"""Sockets have a directory of their own, which is removed when the process that served there was killed."""

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.errors import QueueError, WireError
from tailrace.transfer import socket_directory as module
from tailrace.transfer.socket_directory import directory_of, socket_directory


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:  # a path shorter than pytest's
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def orphan(parent: Path) -> Path:
    directory = parent / "tailrace-ipc-orphan"
    directory.mkdir(mode=0o700)
    (directory / "controller").touch()
    return directory


def test_it_is_there_for_a_block_and_others_leave_it_alone(temporary: Path) -> None:
    with socket_directory() as first, socket_directory() as second:
        (first / "controller").touch()
        assert first.parent == second.parent == temporary
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_has_left_is_removed_by_the_next(temporary: Path) -> None:
    left = orphan(temporary)
    others = [temporary / "tailrace-ipc-file", temporary / "tailrace-ipc-link", temporary / "tailrace-notes"]
    others[0].touch()
    others[1].symlink_to(temporary)
    others[2].mkdir()
    with socket_directory():
        assert not left.exists()
    assert sorted(temporary.iterdir()) == sorted(others)


def test_an_earlier_one_is_taken_again_whether_it_is_still_there_or_not(temporary: Path) -> None:
    left = orphan(temporary)
    for _ in range(2):
        with socket_directory(left) as directory:
            assert directory == left
            with socket_directory():
                assert left.exists()
        assert not left.exists()


def test_one_that_another_process_has_or_may_enter_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    with socket_directory() as taken:
        with pytest.raises(QueueError, match=f"{taken}, where the queue listened before, is another process's"):
            socket_directory(taken).__enter__()
        assert taken.exists()
    left = orphan(temporary)
    left.chmod(0o755)
    with pytest.raises(QueueError, match="or not this user's alone; end that process, or remove the directory"):
        socket_directory(left).__enter__()
    assert os.listdir(left) == ["controller"]


def test_only_a_directory_of_sockets_is_taken_for_one() -> None:
    assert directory_of(["tcp://127.0.0.1:1", "ipc:///tmp/tailrace-ipc-1/controller"]) == Path("/tmp/tailrace-ipc-1")
    assert directory_of(["ipc:///home/me/controller", "tcp://127.0.0.1:1"]) is None
    assert directory_of(["tcp://127.0.0.1:1"]) is None


@pytest.mark.parametrize("name", ["x" * 75, "ü" * 40, "x" * 200, "\udcff"])
def test_where_the_path_of_temporary_files_leaves_no_room_for_a_socket_a_short_one_is_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    long = temporary / name
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with socket_directory() as directory:
        assert directory.parent == Path("/tmp")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with closing(socket.socket(socket.AF_UNIX)) as listening:
            listening.bind(f"{directory}/unit-1000-100000")
    assert not directory.exists()
    assert list(long.iterdir()) == []


def test_where_no_directory_for_sockets_can_be_made_tmpdir_is_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
    refused = pytest.raises(
        WireError, match=r"made in /proc/self: .*; set TMPDIR to a directory .* with a path of at most \d+ bytes"
    )
    with refused, socket_directory():
        pass
