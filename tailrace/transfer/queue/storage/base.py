"""The interface of a unit's storage.

    reserve ──▶ place ──memory: bytes written──▶ commit ──▶ parts ──read──▶ … ──drop──▶ gone
                  └──────────────────────────▶ abandon      ▲
    bytes of the caller ──store: one copy───────────────────┘

A part is what one write brought for one row. Its bytes never change. A storage belongs to one thread, and nothing in it
waits for room: whoever finds it full comes again after a drop.
"""

import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import ClassVar, NamedTuple

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.types import IntArray


def first_number() -> int:
    """From which a storage counts what it gives out: what a client says late is not of the storage after it."""
    return secrets.randbits(62)


class PartId(NamedTuple):
    """What one write brought for one row."""

    slot: int
    generation: int
    tag: int
    """0 for a put, else the lease under which it was written."""


def part_ids(rows: IntArray, tags: IntArray) -> list[PartId]:
    """The parts of `rows` [n, 2] under `tags` [n]."""
    fields = zip(*rows.T.tolist(), tags.tolist(), strict=True)
    return list(map(partial(tuple.__new__, PartId), fields))  # as PartId makes them, in a third of the time


class Place(NamedTuple):
    """A run of bytes in a storage. A client that shares the storage's memory finds it by the first three."""

    segment: int
    offset: int
    """Bytes from the segment's start; a multiple of 8 where `reserve` gave the place."""
    size: int
    """Bytes."""
    serial: int
    """Of the reservation, never used twice, so that a late commit cannot meet another's room; 0 for a part's place."""


class Storage(ABC):
    """Parts by id, and room for those that are being written: by default buffers of this process."""

    lasting: ClassVar[bool] = False
    """Whether a new one of the same name finds the parts of this one. They lie where they can be lost without this
    storage: one that finds a part gone, in `read`, begins with what is there, as a new one would.
    """

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes`: of parts and reserved places together."""
        self._max_bytes = max_bytes
        self._reserved = Reservations()
        self._stored = 0
        """Bytes of all parts."""

    def reserve(self, nbytes: int) -> Place:
        """Room for the parts of one write.

        Raises:
            StorageFull: there is none.
            QueueError: `nbytes` is negative.
        """
        check_room(nbytes, self.nbytes, self._max_bytes)
        return self._reserved.add(0, 0, memoryview(bytearray(nbytes)))

    def memory(self, place: Place) -> memoryview:
        """The bytes of a reserved place, writable.

        Raises:
            QueueError: the place is not reserved (any more).
        """
        return self._reserved.memory(place)

    def commit(self, place: Place, parts: Sequence[tuple[PartId, int]]) -> None:
        """Keep `parts`, each with its size in bytes, which lie one after the other in `place`; all, or fail whole.

        A part that is there already with the same bytes is the retry of a write: the first is kept. The place is
        reserved no more, unless this fails.

        Raises:
            QueueError: the place is not reserved (any more), the parts do not fill it, one is named twice, or one is
                there already with other bytes.
            StorageFull: no room after all; the place is still reserved.
        """
        memory = self._reserved.memory(place)
        fresh = fresh_parts(self, cut(memory, parts))
        self._reserved.remove(place)
        try:
            self._keep(fresh)
        except QueueError:
            self._reserved.put_back(place, memory)
            raise

    def store(self, parts: Sequence[tuple[PartId, memoryview]]) -> None:
        """Keep copies of `parts`, each with its bytes; all, or fail whole. A part that is there already: see `commit`.

        Raises:
            StorageFull: no room.
            QueueError: a part is named twice, or is there already with other bytes.
        """
        fresh = fresh_parts(self, parts)
        check_room(sum(memory.nbytes for _, memory in fresh), self.nbytes, self._max_bytes)
        self._keep(fresh)

    def abandon(self, place: Place) -> None:
        """Free a reserved place. Only when nobody can still be writing to it.

        Raises:
            QueueError: the place is not reserved (any more).
        """
        self._reserved.remove(place)

    @abstractmethod
    def read(self, part: PartId) -> memoryview:
        """The bytes of a part, read-only, good until it is dropped.

        Raises:
            StaleRowError: it is not stored (any more).
        """

    def read_many(self, parts: Sequence[PartId]) -> list[memoryview]:
        """`read` each of `parts`.

        Raises:
            StaleRowError: one is not stored (any more).
        """
        return [self.read(part) for part in parts]

    @abstractmethod
    def size(self, part: PartId) -> int:
        """The bytes that a part has.

        Raises:
            StaleRowError: it is not stored (any more).
        """

    @abstractmethod
    def drop(self, parts: Iterable[PartId]) -> None:
        """Forget parts and free their bytes; those that are not stored are passed over."""

    @abstractmethod
    def parts(self) -> Iterator[PartId]:
        """What is stored, in any order."""

    @abstractmethod
    def __contains__(self, part: PartId) -> bool:
        """Whether a part is stored."""

    @property
    def nbytes(self) -> int:
        """Bytes taken: of parts, and of places that are reserved."""
        return self._stored + self._reserved.nbytes

    @abstractmethod
    def close(self) -> None:
        """Let go of files, memory and connections."""

    @abstractmethod
    def _keep(self, parts: Sequence[tuple[PartId, memoryview]]) -> None:
        """Copy parts that are not stored and for which there is room by `max_bytes`; all, or fail whole.

        Raises:
            StorageFull, QueueError: see `commit`.
        """


class Reservations:
    """The places that a storage gave out and that are neither committed nor abandoned."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Place, memoryview]] = {}
        self._serial = first_number()
        self.nbytes = 0
        """Of all these places."""

    def add(self, segment: int, offset: int, memory: memoryview) -> Place:
        """Give out a place whose bytes are `memory`."""
        self._serial += 1
        place = Place(segment, offset, len(memory), self._serial)
        self._places[place.serial] = (place, memory)
        self.nbytes += place.size
        return place

    def memory(self, place: Place) -> memoryview:
        """See `Storage.memory`."""
        known, memory = self._places.get(place.serial, (None, None))
        if known != place or memory is None:
            raise QueueError(f"{place} is not reserved: it was committed or abandoned, or was never given out")
        return memory

    def remove(self, place: Place) -> None:
        """It is reserved no more."""
        self.memory(place)
        del self._places[place.serial]
        self.nbytes -= place.size

    def put_back(self, place: Place, memory: memoryview) -> None:
        """It is reserved after all, with its bytes as they were."""
        self._places[place.serial] = (place, memory)
        self.nbytes += place.size


def check_room(nbytes: int, taken: int, max_bytes: int) -> None:
    """Whether a write of `nbytes` fits beside what is taken.

    Raises:
        StorageFull, QueueError: see `Storage.reserve`.
    """
    if nbytes < 0:
        raise QueueError(f"a write of {nbytes} bytes was announced; the number must be 0 or more")
    if nbytes > max_bytes:
        raise QueueError(
            f"a write of {nbytes} bytes can never fit the {max_bytes} that a unit stores: raise "
            f"queue.storage.max_bytes, or write fewer or shorter rows at once"
        )
    if taken + nbytes > max_bytes:
        raise StorageFull(
            f"no room for a write of {nbytes} bytes: {taken} of {max_bytes} are taken; "
            f"come again when rows have left, or raise queue.storage.max_bytes"
        )


def check_filled(nbytes: int, parts: Sequence[tuple[PartId, int]]) -> None:
    """Whether parts fill a run of bytes one after the other with so many bytes.

    Raises:
        QueueError: they do not.
    """
    sizes = [size for _, size in parts]
    if min(sizes, default=0) < 0:
        part, size = next((part, size) for part, size in parts if size < 0)
        raise QueueError(f"{part} is said to have {size} bytes; the number must be 0 or more")
    if sum(sizes) != nbytes:
        raise QueueError(f"{len(parts)} parts of {sum(sizes)} bytes in all came in {nbytes} bytes")


def cut(memory: memoryview, parts: Sequence[tuple[PartId, int]]) -> list[tuple[PartId, memoryview]]:
    """The bytes of each of `parts`, which fill `memory` one after the other with so many bytes.

    Raises:
        QueueError: they do not fill it.
    """
    check_filled(len(memory), parts)
    ends = accumulate(size for _, size in parts)
    return [(part, memory[end - size : end]) for (part, size), end in zip(parts, ends, strict=True)]


def check_once(parts: Sequence[tuple[PartId, object]]) -> None:
    """Whether each of `parts` is named once.

    Raises:
        QueueError: one is named twice.
    """
    if len(dict(parts)) < len(parts):
        [(twice, _)] = Counter(part for part, _ in parts).most_common(1)
        raise QueueError(f"{twice} was named twice in one write; a part is written once")


def fresh_parts(storage: Storage, parts: Sequence[tuple[PartId, memoryview]]) -> list[tuple[PartId, memoryview]]:
    """Those of `parts` that are not in `storage` yet; see `Storage.commit`.

    Raises:
        QueueError: one is named twice, or is there already with other bytes.
    """
    check_once(parts)
    fresh = []
    for part, memory in parts:
        if part not in storage:
            fresh.append((part, memory))
        elif storage.read(part) != memory:
            raise QueueError(f"{part} is stored already with other bytes; a part is written once")
    return fresh


def stale(part: PartId) -> StaleRowError:
    """The error for a part that is not stored."""
    return StaleRowError(f"{part} is not stored (any more): its row has left, or another write of it counts")
