"""Shared memory for payloads: a file for each, in a private directory that goes with its process.

    owner     take ── lock EX: nobody reads it ── new serial in its header ── lock SH ──▶ written, read, taken again
    reader    attach ── lock SH ── the serial is the right one? ──▶ read in place ── release

The kernel gives a dead process's locks back, so memory is never written to while somebody reads it, and a reader that
was killed keeps none from being used again. Segments are used again because fresh pages cost more than the copy into
them. The directory is removed like those of the queue's arenas, see there.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

from tailrace.errors import QueueError, WeightsError
from tailrace.transfer.queue.storage.arena import make_directory, map_file, map_new, remove_orphans

SHARED = Path("/dev/shm")
_HEADER_BYTES = 4096
"""The serial of the version, then nothing: payloads begin at a page."""


class Segment:
    """Shared memory of one payload, locked against being overwritten."""

    def __init__(self, path: Path, lock: int, memory: memoryview) -> None:
        """`lock`: the descriptor with the shared lock."""
        self.path = path
        self._lock = lock
        self._memory = memory
        self.payload = memory[_HEADER_BYTES:]

    @property
    def serial(self) -> int:
        """Of the version in it."""
        return int.from_bytes(self._memory[:8], "little")

    def renew(self, serial: int) -> bool:
        """Make it ready for another version; False where somebody reads it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # a refused change of a lock may have lost it
            return False
        self._memory[:8] = serial.to_bytes(8, "little")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return True

    def release(self) -> None:
        """Others may overwrite it from now on. Harmless twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Pool:
    """The segments of one process."""

    def __init__(self, parent: Path = SHARED) -> None:
        """Make a directory in `parent`, and remove those whose processes died.

        Raises:
            WeightsError: it cannot be made.
        """
        try:
            remove_orphans(parent)
            self.directory, self._lock = make_directory(parent)
        except OSError as error:
            raise WeightsError(f"no directory for shared memory can be made in {parent}: {error.strerror}") from None
        self._segments: list[Segment] = []
        self._made = 0

    def take(self, nbytes: int, serial: int, *, busy: Collection[Segment]) -> Segment:
        """Memory for a payload: a segment that nobody reads and that is not `busy`, or a new one.

        Of further free ones, one is kept.

        Raises:
            WeightsError: the machine has no room for it.
        """
        free = [segment for segment in self._segments if segment not in busy]
        for segment in [segment for segment in free if len(segment.payload) < nbytes]:
            self._remove(segment)
            free.remove(segment)
        found = next((segment for segment in free if segment.renew(serial)), None)
        for segment in [segment for segment in free if segment is not found][1:]:
            self._remove(segment)
        return found or self._make(nbytes, serial)

    def close(self) -> None:
        """Remove the directory. What is mapped stays until nobody looks at it. Harmless twice."""
        if self._lock >= 0:
            for segment in self._segments:
                segment.release()
            self._segments.clear()
            shutil.rmtree(self.directory)
            os.close(self._lock)
            self._lock = -1

    def _make(self, nbytes: int, serial: int) -> Segment:
        self._made += 1
        path = self.directory / str(self._made)
        try:
            memory = map_new(path, _HEADER_BYTES + nbytes)
            segment = Segment(path, _locked(path), memory)
        except OSError as error:
            raise WeightsError(
                f"{nbytes} bytes of shared memory for weights cannot be had in {self.directory}: {error.strerror}; "
                f"make room there"
            ) from None
        assert segment.renew(serial), "nobody else knows it"
        self._segments.append(segment)
        return segment

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        segment.path.unlink()
        segment.release()


def attach(path: Path, serial: int, nbytes: int) -> Segment:
    """Memory of another process on this host with the payload of `serial`, not overwritten until `release`.

    Raises:
        WeightsError: it is not there, not this user's, too short, or has another version by now.
    """
    try:
        lock = _locked(path)
    except (OSError, QueueError) as error:
        raise WeightsError(f"the shared memory {path} cannot be opened: {error}") from None
    try:
        known = os.fstat(lock)
        if not stat.S_ISREG(known.st_mode) or known.st_uid != os.getuid() or known.st_size < _HEADER_BYTES + nbytes:
            raise WeightsError(f"{path} is not shared memory of this user with {nbytes} bytes of weights")
        segment = Segment(path, lock, map_file(os.dup(lock)))
        if segment.serial != serial:
            raise WeightsError(f"{path} has version {segment.serial} by now, not {serial}")
    except WeightsError:
        os.close(lock)
        raise
    return segment


def _locked(path: Path) -> int:
    """An open file with a shared lock.

    Raises:
        OSError: there is none, or its owner is about to overwrite it.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
