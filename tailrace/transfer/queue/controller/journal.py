"""What survives a controller: a file to which every decision is added before anybody hears of it.

    [ length, checksum, msgpack of a record ] …      the first record is a Base, each other one a change

A process that is killed loses nothing that it wrote; what it was writing is cut off when the file is opened again. The
operating system writes to the disk in its own time: a machine that loses power may lose the last seconds. When changes
outweigh the state by far, the file is replaced by one that begins with the state of the moment.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from tailrace.errors import QueueError, one_line
from tailrace.transfer.queue.state import ControlState
from tailrace.transfer.queue.wire.messages import Ack, Admit, Answer
from tailrace.types import TaskSpec

_FRAME = struct.Struct("<II")
"""Bytes of the record, and their CRC-32."""
_LEAST_BYTES = 64 * 2**20
"""A journal shorter than this is not replaced."""


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all."""


class Base(Record, frozen=True):
    """The first record: a state to which the others are changes."""

    tasks: list[TaskSpec]
    """The table that it is of."""
    state: ControlState
    closed: bool
    next_unit: int
    """The number of the next unit."""


class Named(Record, frozen=True):
    """A unit got its number. The next one gets another, also when this one has died."""

    unit: int
    name: str


class Reserved(Record, frozen=True):
    """New rows were admitted."""

    client: str
    number: int
    request: Admit
    rows: bytes
    """[n, 2]"""
    units: list[int]


class Entered(Record, frozen=True):
    """All rows of an admission are written."""

    rows: bytes
    """[n, 2]"""
    units: list[int]
    """Those that have them."""


class Withdrew(Record, frozen=True):
    """The rows of an admission will not be written."""

    rows: bytes
    """[n, 2]"""


class Leased(Record, frozen=True):
    """Rows went to a task."""

    client: str
    number: int
    lease_id: int
    task: str
    rows: bytes
    """[n, 2]"""


class Acked(Record, frozen=True):
    """Rows were consumed."""

    client: str
    number: int
    request: Ack


class GaveBack(Record, frozen=True):
    """Rows under a lease are ready again."""

    lease_id: int
    rows: bytes
    """[n, 2]"""
    expired: bool
    """Whether it counts as an expiry."""


class UnitGone(Record, frozen=True):
    """A unit died with what it had."""

    unit: int


class RowsGone(Record, frozen=True):
    """A unit turned out not to have these rows."""

    unit: int
    rows: bytes
    """[n, 2]"""


class Advanced(Record, frozen=True):
    """Weights of this version are there."""

    version: int


class Watched(Record, frozen=True):
    """A client promised signs of life."""

    client: str
    limit_s: float


class Answered(Record, frozen=True):
    """An answer that its client may ask for again; only in a journal that was replaced."""

    client: str
    number: int
    answer: Answer


class Closed(Record, frozen=True):
    """The queue was closed."""


Change: TypeAlias = (
    Named
    | Reserved
    | Entered
    | Withdrew
    | Leased
    | Acked
    | GaveBack
    | UnitGone
    | RowsGone
    | Advanced
    | Watched
    | Answered
    | Closed
)

_DECODER: "msgspec.msgpack.Decoder[Base | Change]" = msgspec.msgpack.Decoder(Base | Change)
_ENCODER = msgspec.msgpack.Encoder()


class Journal:
    """A journal that is being written."""

    def __init__(self, path: Path) -> None:
        """Open or make the file; `records` are to be read first, then `replace` or `append` may follow.

        Raises:
            QueueError: it cannot be opened.
        """
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise QueueError(f"the journal {path} cannot be opened: {error.strerror}") from None
        self._bytes = self._base_bytes = 0

    def records(self) -> Iterator[Base | Change]:
        """What was written before. A record that was not written whole ends it, and is cut off.

        Raises:
            QueueError: it is corrupt, or of another version.
        """
        data = memoryview(self._path.read_bytes())
        end = 0
        while (record := self._record_at(data, end)) is not None:
            try:
                yield _DECODER.decode(record)
            except msgspec.MsgspecError as error:
                raise QueueError(
                    f"the journal {self._path} is not one of this version ({one_line(error)} at byte {end}); "
                    f"serve another directory"
                ) from None
            end += _FRAME.size + len(record)
            self._base_bytes = self._base_bytes or end
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        self._bytes = end

    @property
    def is_long(self) -> bool:
        """Whether it is time to `replace` it."""
        return self._bytes > max(_LEAST_BYTES, 4 * self._base_bytes)

    def append(self, change: Change) -> None:
        """Add a change.

        Raises:
            OSError: it cannot be written, such as to a full disk. The file is as it was before, but the controller is
                ahead of it: it must end, and be started anew from what is written.
        """
        self._bytes += self._write(self._file, [change])

    def replace(self, base: Base, changes: Sequence[Change]) -> None:
        """Begin anew with these; the old file stays until the new one is whole.

        Raises:
            OSError: it cannot be written; the old one is still there.
        """
        new = self._path.with_suffix(".new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            written = self._write(file, [base, *changes])
        except OSError:
            os.close(file)
            raise
        os.replace(new, self._path)
        os.close(self._file)
        self._file, self._bytes, self._base_bytes = file, written, written

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _record_at(self, data: memoryview, start: int) -> memoryview | None:
        """The record that begins there; None where it was not written whole, or there is none."""
        if start + _FRAME.size > len(data) or not any(data[start:]):
            return None  # what a machine that lost power had not written yet may be zeros
        length, checksum = _FRAME.unpack_from(data, start)
        end = start + _FRAME.size + length
        record = data[start + _FRAME.size : end]
        if end <= len(data) and zlib.crc32(record) == checksum and length:
            return record
        if end < len(data):
            raise QueueError(
                f"the journal {self._path} is corrupt at byte {start} of {len(data)}; "
                f"serve another directory, and go on from a checkpoint"
            )
        return None

    def _write(self, file: int, records: Sequence[Base | Change]) -> int:
        frames: list[bytes] = []
        for record in records:
            data = _ENCODER.encode(record)
            frames += (_FRAME.pack(len(data), zlib.crc32(data)), data)
        data = b"".join(frames)
        start = os.lseek(file, 0, os.SEEK_CUR)
        try:
            written = os.write(file, data)
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            os.ftruncate(file, start)
            os.lseek(file, start, os.SEEK_SET)
            raise
        return written
