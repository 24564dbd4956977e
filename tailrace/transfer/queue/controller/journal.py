"""The journal: a file that outlives its controller. Every decision is added to it before anybody hears of it.

    [ length, checksum, checksum of these two │ msgpack of a record ] …

The first record is a Base, every other one a change. A process that is killed loses no record that it wrote whole. A
record that it was still writing is cut off when the file is opened again. Anything else that is not whole is an error.
The operating system writes to the disk in its own time: a machine that loses power may lose the last seconds. When the
changes are several times as long as the state, the file is replaced by one that begins with the present state.
"""

import errno
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from tailrace.errors import UNREADABLE, QueueError, one_line
from tailrace.transfer.queue.messages import Ack, Admit, Answer, Groups
from tailrace.transfer.queue.rows.state import ControlState
from tailrace.types import TaskSpec

_RECORD = struct.Struct("<II")
"""The length of the record in bytes, and its CRC-32."""
_CHECK = struct.Struct("<I")
"""The CRC-32 of the two numbers before it: a wrong length must not pass for a record that was cut off."""
_HEADER_BYTES = _RECORD.size + _CHECK.size
_LEAST_BYTES = 64 * 2**20
"""A journal shorter than this is not replaced."""

VERSION = 4
"""The version of the format, raised with every change of a record or its meaning. Other versions are refused."""

_log = logging.getLogger(__name__)


class JournalError(OSError):
    """The file cannot be read or written. Unlike a TailraceError it is no answer to a request: the controller ends."""


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all records."""


class Base(Record, frozen=True, tag=f"Base {VERSION}"):
    """The first record: the state to which the other records are changes."""

    tasks: list[TaskSpec]
    """The queue's table."""
    state: ControlState
    closed: bool
    next_unit: int
    """The number of the next unit."""


class UnitNamed(Record, frozen=True):
    """A unit got its number. No later unit gets the same one, even when this unit has died."""

    unit: int
    name: str


class PutAdmitted(Record, frozen=True):
    """New rows were admitted."""

    client: str
    number: int
    request: Admit
    rows: bytes
    """[n, 2]"""
    units: list[int]


class RowsEntered(Record, frozen=True):
    """All rows of an admission are written."""

    rows: bytes
    """[n, 2]"""
    units: list[int]
    """The units that have the rows."""


class PutWithdrawn(Record, frozen=True):
    """The rows of an admission will not be written."""

    rows: bytes
    """[n, 2]"""


class RowsLeased(Record, frozen=True):
    """Rows were leased to a task."""

    client: str
    number: int
    lease_id: int
    task: str
    rows: bytes
    """[n, 2]"""


class RowsAcked(Record, frozen=True):
    """Rows were consumed."""

    client: str
    number: int
    request: Ack


class RowsReturned(Record, frozen=True):
    """Rows under a lease are ready again."""

    lease_id: int
    rows: bytes
    """[n, 2]"""
    expired: bool
    """Whether this counts as an expiry."""


class GroupsRemade(Record, frozen=True):
    """Groups under a lease left, to be put again with other rows."""

    client: str
    number: int
    lease_id: int
    groups: list[int]
    """Those that were taken."""
    answer: Groups


class UnitRetired(Record, frozen=True):
    """A unit is to leave."""

    unit: int


class UnitGone(Record, frozen=True):
    """A unit died, and its copies of rows are lost."""

    unit: int


class RowsGone(Record, frozen=True):
    """A unit lacks these rows, which it should have."""

    unit: int
    rows: bytes
    """[n, 2]"""


class RowsCopied(Record, frozen=True):
    """A unit has copies of these rows."""

    unit: int
    rows: bytes
    """[n, 2]"""


class Restored(Record, frozen=True):
    """An empty queue took over the state of a snapshot. `state` names the units that have its rows."""

    state: ControlState


class VersionAdvanced(Record, frozen=True):
    """The weights of this version are available."""

    version: int


class ClientWatched(Record, frozen=True):
    """A client promised signs of life."""

    client: str
    limit_s: float


class RequestAnswered(Record, frozen=True):
    """An answer that its client may ask for again. It is only in a journal that was replaced."""

    client: str
    number: int
    answer: Answer


class Closed(Record, frozen=True):
    """The queue was closed."""


Change: TypeAlias = (
    UnitNamed
    | PutAdmitted
    | RowsEntered
    | PutWithdrawn
    | RowsLeased
    | RowsAcked
    | RowsReturned
    | GroupsRemade
    | UnitRetired
    | UnitGone
    | RowsGone
    | RowsCopied
    | Restored
    | VersionAdvanced
    | ClientWatched
    | RequestAnswered
    | Closed
)

_DECODER: "msgspec.msgpack.Decoder[Base | Change]" = msgspec.msgpack.Decoder(Base | Change)
_ENCODER = msgspec.msgpack.Encoder()


class Journal:
    """A journal that is being written. Every access to its file may raise a JournalError."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Read `records` first; then `replace` and `append` may follow."""
        self._path = path
        with _explained(path, "opened"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._bytes = self._base_bytes = 0
        self.changes = 0
        """Changes appended since the last `replace`."""

    def records(self) -> Iterator[Base | Change]:
        """The records of the file, in order. A last record that was not written whole is cut off.

        Raises:
            QueueError: the file is corrupt, no journal, or of another version.
        """
        with _explained(self._path, "read"):
            data = memoryview(self._path.read_bytes())
        end = 0
        while (record := self._record_at(data, end)) is not None:
            try:
                yield _DECODER.decode(record)
            except UNREADABLE as error:
                raise QueueError(
                    f"the journal {self._path} is not one of this version ({one_line(error)} at byte {end}); "
                    f"serve another directory"
                ) from None
            end += _HEADER_BYTES + len(record)
            self._base_bytes = self._base_bytes or end
        if end < len(data):
            _log.warning(
                "the journal %s ends in a record that was not written whole: its last %d of %d bytes are cut off",
                self._path,
                len(data) - end,
                len(data),
            )
        with _explained(self._path, "cut off"):
            os.ftruncate(self._file, end)
            os.lseek(self._file, end, os.SEEK_SET)
        self._bytes = end

    @property
    def is_long(self) -> bool:
        """Whether the file has grown so long that it is time to `replace` it."""
        return self._bytes > max(_LEAST_BYTES, 4 * self._base_bytes)

    def append(self, change: Change) -> None:
        """Append a change to the file.

        Raises:
            JournalError: the change cannot be written, such as to a full disk. The file is as it was before, but the
                controller is ahead of it. The controller must end and be restarted from the file.
        """
        try:
            self._bytes += _write(self._file, self._bytes, [change])
        except OSError as error:
            raise _error(self._path, "written", error) from None
        self.changes += 1

    def replace(self, base: Base, changes: Sequence[Change]) -> None:
        """Replace the file by one with these records. The old file stays until the new one is whole.

        Raises:
            JournalError: the new file cannot be written; the old one is still there.
        """
        new = self._path.with_suffix(".new")
        with _explained(self._path, "written"):
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                written = _write(file, 0, [base, *changes])
                os.fsync(file)  # else a power loss could leave an empty file under the name, as of a new queue
                os.replace(new, self._path)
            except OSError:
                os.close(file)
                new.unlink(missing_ok=True)
                raise
        os.close(self._file)
        self._file, self._bytes, self._base_bytes = file, written, written
        self.changes = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _record_at(self, data: memoryview, start: int) -> memoryview | None:
        """The record that begins at `start`; None where it was not written whole, or there is none.

        Raises:
            QueueError: the bytes there are no record.
        """
        left = len(data) - start
        if left == 0 or (start > 0 and (left < _HEADER_BYTES or not any(data[start:]))):
            return None  # zeros: a machine that lost power may have left them where data was not yet on the disk
        if left >= _HEADER_BYTES:
            length, checksum = _RECORD.unpack_from(data, start)
            [header_checksum] = _CHECK.unpack_from(data, start + _RECORD.size)
            if zlib.crc32(data[start : start + _RECORD.size]) == header_checksum:
                record = data[start + _HEADER_BYTES :][:length]
                if len(record) < length and start > 0:
                    return None
                if len(record) == length and zlib.crc32(record) == checksum:
                    return record
        raise QueueError(
            f"the journal {self._path} is corrupt at byte {start} of {len(data)}"
            f"{'' if start else ', or is no journal of this version'}; "
            f"serve another directory, and go on from a checkpoint"
        )


def _write(file: int, start: int, records: Sequence[Base | Change]) -> int:
    """Append records, all or none, to a file that ends at `start`. Return the number of bytes written."""
    frames: list[bytes] = []
    for record in records:
        data = _ENCODER.encode(record)
        numbers = _RECORD.pack(len(data), zlib.crc32(data))
        frames += (numbers, _CHECK.pack(zlib.crc32(numbers)), data)
    data = b"".join(frames)
    try:
        written = os.write(file, data)
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        os.ftruncate(file, start)
        os.lseek(file, start, os.SEEK_SET)
        raise
    return written


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError of the block into a JournalError with a fix."""
    try:
        yield
    except OSError as error:
        raise _error(path, what, error) from None


def _error(path: Path, what: str, error: OSError) -> JournalError:
    fix = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return JournalError(f"the journal {path} cannot be {what}: {error.strerror}{fix}")
