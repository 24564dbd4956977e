"""Storage in memory that clients on the same host map: nothing is copied between processes.

    unit    reserve ──▶ place ─────────────▶ commit ──▶ parts ── pin ──▶ places ───────────▶ unpin, drop
    client      ArenaView.segment: written in place             ArenaView.segment: read in place, until it says done

Parts that arrive as frames are copied into a new place, by `store`.

The memory consists of segments: files in a private directory in /dev/shm. All pages of a segment are allocated from the
start. So if the machine is full, making the segment raises an error, and a writer does not get a signal later. An empty
segment stays, because fresh pages cost more than the copy into them. It is removed by `trim`, or when a larger write
needs the room. A client that reads after its pin was taken back finds other bytes. If the segment is gone and the
machine is full, it gets a signal.
"""

import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.errors import QueueError, StorageFull
from tailrace.transfer.queue.storage.addresses import join, split
from tailrace.transfer.queue.storage.base import (
    PartBatch,
    PartId,
    Storage,
    check_filled,
    check_once,
    check_room,
    cut,
    first_number,
    stale,
)
from tailrace.transfer.queue.storage.runs import Runs
from tailrace.transfer.shared_files import make_directory, map_file, map_new, remove_orphans

_ALIGNMENT = 8
"""In bytes: cells lie at multiples of it."""


class Place(NamedTuple):
    """A run of bytes in an arena. A client that maps the memory finds it by `segment`, `offset` and `size`."""

    segment: int
    offset: int
    """In bytes from the segment's start; a multiple of 8 if the place comes from `reserve`."""
    size: int
    """In bytes."""
    serial: int
    """The number of the reservation; 0 for a part's place. It is never used twice, so a late commit cannot hit a newer
    reservation."""


class _Part(msgspec.Struct, eq=False):
    address: int
    size: int
    pins: int = 0
    dropped: bool = False
    """Whether the part was dropped: its id is unknown, but its bytes stay while it has pins."""


class ArenaStorage(Storage):
    """A `Storage` in shared memory. The bytes that `read` returned may be overwritten once the part is dropped, unless
    it is pinned. Reserved places take bytes too, and so do dropped parts while they are pinned.
    """

    def __init__(self, *, parent: Path, max_bytes: int, segment_bytes: int = 64 * 2**20) -> None:
        """Make a directory for the segments in `parent`, and remove the directories of units that died.

        `max_bytes`: the most bytes of all segments together. `segment_bytes`: the size of a segment, unless a write
        needs a larger one.

        Raises:
            QueueError: the directory cannot be made.
        """
        super().__init__(max_bytes=max_bytes)
        try:
            remove_orphans(parent)
            self.directory, self._lock = make_directory(parent)
            """The directory in which clients find the segments."""
        except OSError as error:
            raise QueueError(f"no directory for shared memory can be made in {parent}: {error.strerror}") from None
        self._segment_bytes = segment_bytes
        self._segments: dict[int, memoryview] = {}
        self._last_segment = 0
        self._idle: set[int] = set()
        """The segments that were empty at the last `trim` and were not written to since."""
        self._runs = Runs(align=_ALIGNMENT)
        self._reserved: dict[int, Place] = {}
        """The places that are neither committed nor abandoned, by serial."""
        self._reserved_bytes = 0
        self._last_serial = first_number()
        self._parts: dict[PartId, _Part] = {}
        self._pins: dict[int, list[_Part]] = {}
        self._last_pin = first_number()

    def store(self, written: Sequence[tuple[PartBatch, memoryview]]) -> None:
        """See `Storage.store`."""
        parts = self._new(written)
        nbytes = sum([memory.nbytes for _, memory in parts])
        address = self._allocate(nbytes) if nbytes else 0
        for part, memory in parts:
            self._memory(address, memory.nbytes)[:] = memory
            self._keep(part, address, memory.nbytes)
            address += memory.nbytes

    @property
    def nbytes(self) -> int:
        """See `Storage.nbytes`."""
        return self._stored + self._reserved_bytes

    def reserve(self, nbytes: int) -> Place:
        """Reserve room for the parts of one write.

        Raises:
            StorageFull: there is no room: free bytes may be left that are not adjacent, or the machine may have no more
                shared memory before `max_bytes` are taken.
            QueueError: `nbytes` is negative, or there will never be room for it.
        """
        check_room(nbytes, self.nbytes, self._max_bytes)
        segment, offset = split(self._allocate(nbytes)) if nbytes else (0, 0)
        self._last_serial += 1
        place = Place(segment, offset, nbytes, self._last_serial)
        self._reserved[place.serial] = place
        self._reserved_bytes += nbytes
        return place

    def memory(self, place: Place) -> memoryview:
        """Return the bytes of a reserved place, writable.

        Raises:
            QueueError: the place is not reserved (any more).
        """
        if self._reserved.get(place.serial) != place:
            raise QueueError(f"{place} is not reserved: it was committed or abandoned, or was never given out")
        return self._memory(join(place.segment, place.offset), place.size)

    def commit(self, place: Place, parts: Sequence[tuple[PartId, int]]) -> None:
        """Keep `parts`, each with its size in bytes, which lie one after the other in `place`. Nothing is copied.

        Either all parts are kept or none. A part that is stored already with the same bytes is the retry of a write:
        the first one is kept. The reservation ends, unless this fails.

        Raises:
            QueueError: the place is not reserved (any more), the parts do not fill it, a part is named twice, or a part
                is stored already with other bytes.
        """
        repeated = self._repeated(place, parts)
        self._take_back(place)
        address = join(place.segment, place.offset)
        for part, size in parts:
            if part in repeated:
                self._runs.free(address, size)
            else:
                self._keep(part, address, size)
            address += size

    def _repeated(self, place: Place, parts: Sequence[tuple[PartId, int]]) -> Set[PartId]:
        """Return those of the `parts` in `place` that are stored already with the same bytes.

        Raises:
            QueueError: see `commit`.
        """
        memory = self.memory(place)
        named = dict(parts)
        if self._parts.keys().isdisjoint(named):
            check_filled(place.size, parts)
            check_once(parts)
            return frozenset()
        return named.keys() - dict(self._fresh(cut(memory, parts))).keys()

    def abandon(self, place: Place) -> None:
        """Free a reserved place. Call it only if no client can still be writing to the place.

        Raises:
            QueueError: the place is not reserved (any more).
        """
        self._take_back(place)
        self._runs.free(join(place.segment, place.offset), place.size)

    def read(self, part: PartId) -> memoryview:
        """See `Storage.read`."""
        known = self._known(part)
        return self._memory(known.address, known.size).toreadonly()

    def places(self, parts: Iterable[PartId]) -> list[Place]:
        """Return the places of `parts`. Clients may read there while the parts are pinned.

        Raises:
            StaleRowError: a part is not stored (any more).
        """
        known = [self._known(part) for part in parts]
        return [Place(*(split(part.address) if part.size else (0, 0)), part.size, 0) for part in known]

    def pin(self, parts: Iterable[PartId]) -> int:
        """Keep the bytes of `parts` where they are until `unpin`, even if they are dropped. Return the pin's number.

        Raises:
            StaleRowError: a part is not stored (any more); then none is pinned.
        """
        known = [self._known(part) for part in parts]
        for part in known:
            part.pins += 1
        self._last_pin += 1
        self._pins[self._last_pin] = known
        return self._last_pin

    def unpin(self, pin: int) -> None:
        """Release the parts that a pin keeps.

        Raises:
            QueueError: there is no such pin (any more).
        """
        if pin not in self._pins:
            raise QueueError(f"there is no pin {pin}: it was taken back, or never given out")
        known = self._pins.pop(pin)
        for part in known:
            part.pins -= 1
        self._free({id(part): part for part in known if part.dropped and not part.pins}.values())

    def drop(self, parts: Iterable[PartId]) -> None:
        """See `Storage.drop`. The bytes of a pinned part are freed by its last `unpin`."""
        known = [self._parts.pop(part) for part in parts if part in self._parts]
        for part in known:
            part.dropped = True
        self._free(part for part in known if not part.pins)

    def parts(self) -> Iterator[PartId]:
        """See `Storage.parts`."""
        return iter(list(self._parts))

    def __contains__(self, part: PartId) -> bool:
        """See `Storage.__contains__`."""
        return part in self._parts

    def trim(self) -> None:
        """Give back the memory of segments that were empty and unused since the last call."""
        for number in list(self._idle):
            self._remove_segment(number)
        self._idle = {number for number in self._segments if self._is_empty(number)}

    def close(self) -> None:
        """Remove the directory. Memory stays while a process has it mapped or an array refers to it."""
        self._segments.clear()
        self._parts.clear()
        if self._lock >= 0:
            with suppress(FileNotFoundError):  # it was removed before
                shutil.rmtree(self.directory)
            os.close(self._lock)
            self._lock = -1

    def _allocate(self, nbytes: int) -> int:
        """Allocate at least 1 byte, in a new segment if necessary. Return the address."""
        address = self._runs.allocate(nbytes)
        if address is None:
            self._add_segment(nbytes)
            address = self._runs.allocate(nbytes)
            assert address is not None, "a new segment holds the write that it was made for"
        self._idle.discard(split(address)[0])
        return address

    def _keep(self, part: PartId, address: int, size: int) -> None:
        self._parts[part] = _Part(address, size)
        self._stored += size

    def _take_back(self, place: Place) -> None:
        """End the reservation of a place.

        Raises:
            QueueError: the place is not reserved.
        """
        self.memory(place)
        del self._reserved[place.serial]
        self._reserved_bytes -= place.size

    def _known(self, part: PartId) -> _Part:
        if part not in self._parts:
            raise stale(part)
        return self._parts[part]

    def _memory(self, address: int, size: int) -> memoryview:
        if size == 0:
            return memoryview(bytearray())
        segment, offset = split(address)
        return self._segments[segment][offset : offset + size]

    def _free(self, parts: Iterable[_Part]) -> None:
        runs = [(part.address, part.size) for part in parts]
        self._stored -= sum(size for _, size in runs)
        self._runs.free_all(run for run in runs if run[1])

    def _add_segment(self, needed: int) -> None:
        """Add free memory that holds a write of `needed` bytes. Empty segments are removed if necessary."""
        mapped = sum(map(len, self._segments.values()))
        empty = {number: len(memory) for number, memory in self._segments.items() if self._is_empty(number)}
        if mapped - sum(empty.values()) + needed > self._max_bytes:
            raise StorageFull(
                f"no room for a write of {needed} bytes that lie together: {self.nbytes} of {self._max_bytes} are "
                f"taken; come again when rows have left, or raise queue.storage.max_bytes"
            )
        while mapped + needed > self._max_bytes:
            number = next(iter(empty))
            mapped -= empty.pop(number)
            self._remove_segment(number)
        # At most half of the free bytes, so that the machine's other units find room for a segment too.
        size = max(needed, min(self._segment_bytes, self._max_bytes - mapped, _free_bytes(self.directory) // 2))
        while (failure := self._make_segment(size)) is not None:
            if size > needed:
                size = max(needed, size // 2)
            elif empty:  # each is too small itself, but its bytes may be the ones that are missing
                self._remove_segment(empty.popitem()[0])
            else:
                raise self._no_room(needed, failure)

    def _no_room(self, needed: int, failure: OSError) -> QueueError:
        known = os.statvfs(self.directory)
        total, free = known.f_blocks * known.f_frsize, known.f_bavail * known.f_frsize
        text = (
            f"{needed} bytes of shared memory cannot be had in {self.directory}: {failure.strerror}; {free} of {total} "
            f"bytes are free there; make room (in a container: a larger --shm-size), or give another "
            f"queue.storage.directory or queue.storage.type"
        )
        return QueueError(text) if 0 < total < needed else StorageFull(text)

    def _make_segment(self, size: int) -> OSError | None:
        """Add a segment of `size` bytes. Return the error if the machine has too little memory, else None."""
        try:
            memory = map_new(self.directory / str(self._last_segment + 1), size)
        except OSError as error:
            return error
        self._last_segment += 1
        self._segments[self._last_segment] = memory
        self._runs.free(join(self._last_segment, 0), size)
        return None

    def _is_empty(self, number: int) -> bool:
        return self._runs.is_free(join(number, 0), len(self._segments[number]))

    def _remove_segment(self, number: int) -> None:
        self._idle.discard(number)
        self._runs.withdraw(join(number, 0))
        (self.directory / str(number)).unlink(missing_ok=True)
        memory = self._segments.pop(number).obj
        assert isinstance(memory, mmap.mmap), "a segment is a view of a whole file"
        with suppress(OSError):  # only some file systems can do this, among them those in memory
            memory.madvise(mmap.MADV_REMOVE)  # else the pages stay while a client has the segment mapped


class ArenaView:
    """A client's view of the memory of an arena on its host. Segments are mapped when they are first needed."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the arena's directory, as its unit names it."""
        self._directory = directory
        self._segments: dict[int, memoryview] = {}

    def segment(self, number: int) -> memoryview:
        """Return all bytes of a segment.

        Raises:
            QueueError: there is no such segment.
        """
        known = self._segments.get(number)
        return self._map(number) if known is None else known

    def close(self) -> None:
        """Unmap all segments that are not in use."""
        self._segments.clear()

    def _map(self, number: int) -> memoryview:
        """Map a segment, and release the segments that the unit has removed."""
        for known in [known for known in self._segments if not (self._directory / str(known)).exists()]:
            del self._segments[known]
        path = self._directory / str(number)
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise QueueError(f"segment {number} of the arena cannot be opened: {path}: {error.strerror}") from None
        try:
            self._segments[number] = map_file(file)
        finally:
            os.close(file)
        return self._segments[number]


def _free_bytes(directory: Path) -> int:
    """Return the free bytes of the file system; 2^63 if it has no bound."""
    known = os.statvfs(directory)
    return known.f_bavail * known.f_frsize if known.f_blocks else 1 << 63
