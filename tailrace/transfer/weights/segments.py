"""Shared memory for payloads: a file for each, in a private directory that lasts as long as its process.

    owner     take ── lock EX: nobody reads it ── new serial in its header ── lock SH ──▶ written, read, taken again
    reader    attach ── lock SH ── the serial is the right one? ──▶ read in place ── release

Making fresh memory takes about a second for each GB, and mapping it takes a part of that. So `take` and `attach` are
called where a thread may wait. They let the other threads of the process run meanwhile.

The locks keep memory from being overwritten while somebody reads it. The kernel releases the locks of a dead process,
so a killed reader does not keep memory from being reused. Segments are reused because fresh pages cost more than the
copy into them. See `shared_files` for the directory.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tailrace.errors import ConfigError, WeightsError, one_line
from tailrace.transfer.shared_files import make_directory, make_file, map_file, remove_orphans

SHARED = Path("/dev/shm")
_HEADER_BYTES = 4096
"""The header holds the version's serial, then nothing: payloads begin at a page."""


def check_shared_memory(directory: Path = SHARED) -> None:
    """Check that weights can go from process to process on this machine.

    Raises:
        ConfigError: there is no `directory`, or this user may not write there.
    """
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigError(
            f"pipeline.placement=separated: weights go from process to process in {directory}, and no file can be "
            f"made there: {error.strerror}; mount a file system in memory there, give this user the right to write "
            f"to it, or choose pipeline.placement=colocated"
        ) from None


class Segment:
    """The mapped shared memory of one payload. Any thread may call `hold`, `release`, `retire` and `close`."""

    def __init__(self, path: Path, file: int) -> None:
        """Map `file`, an open descriptor that this segment takes over. The lock is on it.

        Raises:
            OSError, ValueError: the file cannot be mapped.
        """
        self.path = path
        self._file = file
        try:
            self._memory = map_file(file, at_once=False)
        except (OSError, ValueError):  # ValueError: the file is empty
            os.close(file)
            raise
        self.payload = self._memory[_HEADER_BYTES:]
        self._lock = threading.RLock()
        """Guards the fields below."""
        self._holds = 0
        self._retired = False

    @property
    def serial(self) -> int:
        """The serial of the version in this memory."""
        return int.from_bytes(self._memory[:8], "little")

    @property
    def is_there(self) -> bool:
        """Whether others still find the file under its path."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False

    @property
    def is_open(self) -> bool:
        """Whether the segment has not been closed."""
        return self._file >= 0

    def renew(self, serial: int) -> bool:
        """Prepare the segment for another version, and keep it; return False if somebody reads it. For its owner."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._memory[:8] = serial.to_bytes(8, "little")
        fcntl.flock(self._file, fcntl.LOCK_SH)
        return True

    def hold(self) -> bool:
        """Keep the segment from being overwritten; return False if it is being overwritten now. For readers.

        The hold lasts until as many calls of `release`.
        """
        with self._lock:
            if self._holds == 0:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            self._holds += 1
            return True

    def release(self) -> None:
        """End one `hold`."""
        with self._lock:
            self._holds -= 1
            assert self._holds >= 0, "each hold is ended once"
            if self._holds == 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough: the mapping has the file open, too
                if self._retired:
                    self.close()

    def retire(self) -> None:
        """Close the segment as soon as no reader holds it."""
        with self._lock:
            self._retired = True
            if self._holds == 0:
                self.close()

    def close(self) -> None:
        """Close the file. The memory stays while views of it exist. Calling it twice is harmless."""
        with self._lock:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)
                os.close(self._file)
                self._file = -1


class Pool:
    """The segments of one process. Any thread may use it."""

    def __init__(self, parent: Path = SHARED) -> None:
        """Make a directory in `parent`, and remove the directories of dead processes.

        Raises:
            WeightsError: the directory cannot be made.
        """
        try:
            remove_orphans(parent)
            self.directory, self._lock = make_directory(parent)
        except OSError as error:
            raise WeightsError(
                f"no directory for shared memory can be made in {parent}: {error.strerror}; weights go from process to "
                f"process there: mount a file system in memory, or give this user the right to write to it"
            ) from None
        self._using = threading.Lock()
        self._segments: list[Segment] = []
        self._made = 0

    def reserve(self, nbytes: int, count: int) -> None:
        """Make `count` free segments ahead: touching fresh pages takes many times as long as writing to them.

        Raises:
            WeightsError: the machine has no room for them.
        """
        with self._using:
            for _ in range(count):
                self._make(nbytes)

    def take(self, nbytes: int, serial: int, *, busy: Collection[Segment]) -> Segment:
        """Take memory for a payload: a segment that is neither read nor `busy`, or a new one.

        One further free segment is kept; the others are removed.

        Raises:
            WeightsError: the machine has no room for it.
        """
        with self._using:
            free = [segment for segment in self._segments if segment not in busy]
            for segment in [segment for segment in free if len(segment.payload) < nbytes]:
                self._remove(segment)
                free.remove(segment)
            found = next((segment for segment in free if segment.renew(serial)), None)
            for segment in [segment for segment in free if segment is not found][1:]:
                self._remove(segment)
            if found is None:
                found = self._make(nbytes)
                assert found.renew(serial), "nobody else knows it"
            return found

    def close(self) -> None:
        """Remove the directory. Mapped memory stays while views of it exist. Calling it twice is harmless."""
        with self._using:
            if self._lock >= 0:
                for segment in self._segments:
                    segment.close()
                self._segments.clear()
                with suppress(FileNotFoundError):  # somebody else has removed it
                    shutil.rmtree(self.directory)
                os.close(self._lock)
                self._lock = -1

    def _make(self, nbytes: int) -> Segment:
        self._made += 1
        path = self.directory / str(self._made)
        try:
            segment = Segment(path, make_file(path, _HEADER_BYTES + nbytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise WeightsError(
                f"{nbytes} bytes of shared memory for weights cannot be had in {self.directory}: {error.strerror}; "
                f"make room there"
            ) from None
        self._segments.append(segment)
        return segment

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        segment.path.unlink(missing_ok=True)
        segment.close()


class Attachments:
    """Segments of other processes on this host. They stay mapped, since mapping them costs as much as reading them."""

    def __init__(self) -> None:
        """Start without segments."""
        self._segments: dict[Path, Segment] = {}
        self._retired: list[Segment] = []
        """Segments that their owners have removed and that are still held here."""

    def attach(self, path: Path, serial: int, nbytes: int) -> Segment:
        """Attach the memory with the payload of `serial`. It is not overwritten before its `release`.

        Raises:
            WeightsError: the memory is not there, not this user's, too short, or has another version by now.
        """
        self._retire_removed()
        try:
            segment = self._segments.get(path) or Segment(path, _checked(path))
        except (OSError, ValueError) as error:  # ValueError: the path is invalid
            raise WeightsError(f"the shared memory {path} cannot be opened: {one_line(error)}") from None
        self._segments[path] = segment
        if len(segment.payload) < nbytes or not segment.hold():
            raise WeightsError(f"{path} has no version of {nbytes} bytes, or is just being used again")
        if segment.serial != serial:
            segment.release()
            raise WeightsError(f"{path} has version {segment.serial} by now, not {serial}")
        return segment

    def close(self) -> None:
        """Close all segments. Calling it twice is harmless."""
        for segment in [*self._segments.values(), *self._retired]:
            segment.close()
        self._segments.clear()
        self._retired.clear()

    def _retire_removed(self) -> None:
        for path in [path for path, segment in self._segments.items() if not segment.is_there]:
            segment = self._segments.pop(path)
            segment.retire()
            self._retired.append(segment)
        self._retired = [segment for segment in self._retired if segment.is_open]


def _checked(path: Path) -> int:
    """Open a file of this user.

    Raises:
        OSError: the file cannot be opened.
        WeightsError: it is not shared memory of this user.
    """
    file = _open(path)
    known = os.fstat(file)
    if not stat.S_ISREG(known.st_mode) or known.st_uid != os.getuid() or known.st_size < _HEADER_BYTES:
        os.close(file)
        raise WeightsError(f"{path} is not shared memory of this user")
    return file


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
