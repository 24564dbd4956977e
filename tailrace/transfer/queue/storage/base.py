"""The interface of a unit's storage.

    bytes of the caller ──store: one copy──▶ parts ──read──▶ … ──drop──▶ gone

A part is what one write brought for one row. Its bytes never change. A storage belongs to one thread, and nothing in it
waits for room: whoever finds it full comes again after a drop.
"""

import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class PartBatch:
    """Parts with cells in the same columns."""

    parts: Sequence[PartId]
    columns: Sequence[str]
    """In the order in which their cells lie in memory."""
    lengths: IntArray
    """[parts, columns], see `Run.lengths`."""
    sizes: Sequence[int]
    """Bytes of each part, padding included."""

    @property
    def sized(self) -> list[tuple[PartId, int]]:
        """The parts, each with its bytes."""
        return list(zip(self.parts, self.sizes, strict=True))


class Storage(ABC):
    """Parts by id."""

    lasting: ClassVar[bool] = False
    """Whether a new one of the same name finds the parts of this one. They lie where they can be lost without this
    storage: one that finds a part gone, in `read`, begins with what is there, as a new one would.
    """

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes`: of all parts."""
        self._max_bytes = max_bytes
        self._stored = 0
        """Bytes of all parts."""

    @abstractmethod
    def store(self, written: Sequence[tuple[PartBatch, memoryview]]) -> None:
        """Keep copies of parts, each batch with the memory in which its parts lie one after the other.

        All are kept, or this fails whole. A part that is there already with the same bytes is the retry of a write: the
        first is kept.

        Raises:
            StorageFull: no room.
            QueueError: parts do not fill their memory, one is named twice, or one is there already with other bytes; or
                there will never be room.
        """

    def take_stock(self) -> list[PartBatch]:
        """The parts that an earlier storage of the same name has left, as they are now: none unless it is `lasting`.

        Raises:
            QueueError: what is there is not parts.
        """
        return []

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
        """Bytes taken."""
        return self._stored

    @abstractmethod
    def close(self) -> None:
        """Let go of files, memory and connections."""

    def _new(self, written: Sequence[tuple[PartBatch, memoryview]]) -> list[tuple[PartId, memoryview]]:
        """The parts that `store` has still to keep, each with its bytes; there is room for them by `max_bytes`.

        Raises:
            StorageFull, QueueError: see `store`.
        """
        fresh = self._fresh([piece for batch, memory in written for piece in cut(memory, batch.sized)])
        check_room(sum(memory.nbytes for _, memory in fresh), self.nbytes, self._max_bytes)
        return fresh

    def _fresh(self, parts: Sequence[tuple[PartId, memoryview]]) -> list[tuple[PartId, memoryview]]:
        """Those of `parts` that are not there yet.

        Raises:
            QueueError: one is named twice, or is there already with other bytes.
        """
        check_once(parts)
        fresh = []
        for part, memory in parts:
            if part not in self:
                fresh.append((part, memory))
            elif self.read(part) != memory:
                raise QueueError(f"{part} is stored already with other bytes; a part is written once")
        return fresh


def check_room(nbytes: int, taken: int, max_bytes: int) -> None:
    """Whether a write of `nbytes` fits beside what is taken.

    Raises:
        StorageFull: there is no room.
        QueueError: `nbytes` is negative, or more than there will ever be room for.
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


def stale(part: PartId) -> StaleRowError:
    """The error for a part that is not stored."""
    return StaleRowError(f"{part} is not stored (any more): its row has left, or another write of it counts")
