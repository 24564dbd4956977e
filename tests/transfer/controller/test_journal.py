import errno
import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tailrace.errors import QueueError, TailraceError
from tailrace.transfer.queue.controller.journal import Base, Change, Closed, Journal, JournalError, VersionAdvanced
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tests.transfer.tables import table


def base() -> Base:
    tasks = table()
    return Base([task.spec for task in tasks], ControlPlane(tasks, lease_s=1.0).export(), False, 0)


def written(path: Path, *changes: Change) -> list[Base | Change]:
    """Write a journal with a base and these changes, and return its records."""
    journal = Journal(path)
    journal.replace(base(), [])
    for change in changes:
        journal.append(change)
    journal.close()
    return [base(), *changes]


def read(path: Path) -> list[Base | Change]:
    journal = Journal(path)
    try:
        return list(journal.records())
    finally:
        journal.close()


def test_a_journal_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read(path) == []
    assert read(path) == []
    records = written(path, VersionAdvanced(1), Closed())
    assert read(path) == records


LAST_BYTES = 12 + len(msgspec.msgpack.encode(VersionAdvanced(2)))


@pytest.mark.parametrize("cut", range(1, LAST_BYTES))
def test_what_was_not_written_whole_is_cut_off_and_written_anew(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    records = written(path, VersionAdvanced(1), VersionAdvanced(2))
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    journal = Journal(path)
    assert list(journal.records()) == records[:-1]
    assert f"its last {LAST_BYTES - cut} of {len(data) - cut} bytes are cut off" in caplog.text
    journal.append(VersionAdvanced(3))
    journal.close()
    assert read(path) == [*records[:-1], VersionAdvanced(3)]


@pytest.mark.parametrize("zeros", [1, 8, 4096])
def test_zeros_at_the_end_are_nothing(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "journal"
    records = written(path, VersionAdvanced(1))
    path.write_bytes(path.read_bytes() + bytes(zeros))
    assert read(path) == records


def test_a_bit_that_was_flipped_is_an_error_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, VersionAdvanced(1), VersionAdvanced(2))
    data = path.read_bytes()
    for byte in range(len(data)):
        for bit in (0, 7):
            flipped = bytearray(data)
            flipped[byte] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(QueueError, match=r"corrupt at byte \d+ of .*; serve another directory"):
                read(path)
            assert path.read_bytes() == flipped, "nothing is cut off"


@pytest.mark.parametrize("content", [b"j", b"junk\n", b"what somebody wrote " * 20, bytes(4096)])
def test_a_file_that_is_no_journal_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(QueueError, match=f"corrupt at byte 0 of {len(content)}, or is no journal of this version"):
        read(path)
    assert path.read_bytes() == content


def test_a_journal_whose_first_record_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    data = path.read_bytes()
    for end in range(1, len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(QueueError, match="corrupt at byte 0"):
            read(path)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the disk take only a given number of further bytes."""
    write = os.write

    def fill(left: int) -> None:
        def write_some(file: int, data: bytes) -> int:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = write(file, data[:left])
            left -= done
            return done

        monkeypatch.setattr(os, "write", write_some)

    return fill


MAKE_ROOM = "journal cannot be written: No space left on device; make room there"


def test_a_full_disk_ends_the_controller_with_the_fix_and_the_file_stays_whole(
    tmp_path: Path, full: Callable[[int], None]
) -> None:
    path = tmp_path / "journal"
    records = written(path, VersionAdvanced(1))
    journal = Journal(path)
    assert list(journal.records()) == records
    full(5)
    with pytest.raises(JournalError, match=MAKE_ROOM) as caught:
        journal.append(VersionAdvanced(2))
    assert not isinstance(caught.value, TailraceError), "which would be the answer to a request"
    journal.close()
    assert path.read_bytes()
    assert read(path) == records


def test_a_journal_that_cannot_be_replaced_stays_alone(tmp_path: Path, full: Callable[[int], None]) -> None:
    path = tmp_path / "journal"
    records = written(path, VersionAdvanced(1))
    journal = Journal(path)
    list(journal.records())
    full(5)
    with pytest.raises(JournalError, match=MAKE_ROOM):
        journal.replace(base(), [])
    journal.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["journal"]
    assert read(path) == records


def test_a_journal_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"nowhere/journal cannot be opened: No such file or directory$"):
        Journal(tmp_path / "nowhere" / "journal")


def test_a_journal_whose_first_record_is_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, Closed())
    before = path.read_bytes()
    path.write_bytes(framed(msgspec.msgpack.encode(["Base", [], [], False, 0])) + before)
    message = "is not one of this version (Invalid value 'Base' - at `$[0]` at byte 0); serve another directory"
    with pytest.raises(QueueError, match=re.escape(message)):
        read(path)


def framed(record: bytes) -> bytes:
    """A record, framed as in a journal."""
    header = struct.pack("<II", len(record), zlib.crc32(record))
    return header + struct.pack("<I", zlib.crc32(header)) + record


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    journal = Journal(path)
    list(journal.records())
    journal.append(123)  # type: ignore[arg-type]
    journal.close()
    with pytest.raises(QueueError, match="is not one of this version"):
        read(path)
