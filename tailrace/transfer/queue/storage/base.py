"""The interface of a unit's storage.

    bytes of the caller ──store: one copy──▶ parts ──read──▶ … ──drop──▶ gone

A part is the cells that one write brought for one row. Its bytes never change. A storage belongs to one thread, and
nothing in it waits for room: if it is full, the caller tries again after a drop.
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
    """Return a random start for a storage's numbers: a late message of a client cannot match the next storage's."""
    return secrets.randbits(62)


class PartId(NamedTuple):
    """The id of a part: the cells that one write brought for one row."""

    slot: int
    generation: int
    tag: int
    """0 for a put, else the lease under which the part was written."""


def part_ids(rows: IntArray, tags: Iterable[int]) -> list[PartId]:
    """Return the ids of the parts of `rows` [n, 2] under the first n of `tags`."""
    fields = zip(*rows.T.tolist(), tags, strict=False)
    return list(map(partial(tuple.__new__, PartId), fields))  # the same as PartId(...), in a third of the time


@dataclass(frozen=True, slots=True, eq=False)
class PartBatch:
    """Parts with cells in the same columns."""

    parts: Sequence[PartId]
    columns: Sequence[str]
    """The columns, in the order in which the cells of a part lie in memory."""
    lengths: IntArray
    """[parts, columns], see `Run.lengths`."""
    sizes: Sequence[int]
    """Bytes of each part, padding included."""

    @property
    def sized(self) -> list[tuple[PartId, int]]:
        """The parts, each with its size in bytes."""
        return list(zip(self.parts, self.sizes, strict=True))


class Storage(ABC):
    """The parts of a unit, by id."""

    lasting: ClassVar[bool] = False
    """Whether a new storage of the same name finds the parts of this one. Such parts can be lost while this storage
    lives: when `read` finds one gone, the storage begins again with what is left, as a new one would.
    """

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes`: the most bytes of all parts together."""
        self._max_bytes = max_bytes
        self._stored = 0
        """The bytes of all parts."""

    @abstractmethod
    def store(self, written: Sequence[tuple[PartBatch, memoryview]]) -> None:
        """Keep copies of parts, each batch with the memory in which its parts lie one after the other.

        Either all parts are kept or none. A part that is stored already with the same bytes is the retry of a write:
        the first one is kept.

        Raises:
            StorageFull: there is no room now.
            QueueError: the parts do not fill their memory, a part is named twice, or a part is stored already with
                other bytes; or there will never be room.
        """

    def take_stock(self) -> list[PartBatch]:
        """Look up and return the parts that an earlier storage of this name has left: none unless it is `lasting`.

        Raises:
            QueueError: the stored data is not parts.
        """
        return []

    @abstractmethod
    def read(self, part: PartId) -> memoryview:
        """Return the bytes of a part, read-only and valid until the part is dropped.

        Raises:
            StaleRowError: the part is not stored (any more).
        """

    def read_many(self, parts: Sequence[PartId]) -> list[memoryview]:
        """Return the bytes of each of `parts`, see `read`.

        Raises:
            StaleRowError: a part is not stored (any more).
        """
        return [self.read(part) for part in parts]

    @abstractmethod
    def drop(self, parts: Iterable[PartId]) -> None:
        """Forget parts and free their bytes. Parts that are not stored are ignored."""

    @abstractmethod
    def parts(self) -> Iterator[PartId]:
        """The ids of the stored parts, in any order."""

    @abstractmethod
    def __contains__(self, part: PartId) -> bool:
        """Whether a part is stored."""

    @property
    def nbytes(self) -> int:
        """The bytes that are taken."""
        return self._stored

    @abstractmethod
    def close(self) -> None:
        """Release files, memory and connections."""

    def _new(self, written: Sequence[tuple[PartBatch, memoryview]]) -> list[tuple[PartId, memoryview]]:
        """Return the parts that `store` must keep, each with its bytes. They fit `max_bytes`.

        Raises:
            StorageFull, QueueError: see `store`.
        """
        fresh = self._fresh([piece for batch, memory in written for piece in cut(memory, batch.sized)])
        check_room(sum(memory.nbytes for _, memory in fresh), self.nbytes, self._max_bytes)
        return fresh

    def _fresh(self, parts: Sequence[tuple[PartId, memoryview]]) -> list[tuple[PartId, memoryview]]:
        """Return those of `parts` that are not stored yet.

        Raises:
            QueueError: a part is named twice, or is stored already with other bytes.
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
    """Check that a write of `nbytes` fits beside the bytes that are taken.

    Raises:
        StorageFull: there is no room now.
        QueueError: `nbytes` is negative, or there will never be room for it.
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
    """Check that the sizes of parts add up to `nbytes` and are not negative.

    Raises:
        QueueError: they do not, or one is negative.
    """
    sizes = [size for _, size in parts]
    if min(sizes, default=0) < 0:
        part, size = next((part, size) for part, size in parts if size < 0)
        raise QueueError(f"{part} is said to have {size} bytes; the number must be 0 or more")
    if sum(sizes) != nbytes:
        raise QueueError(f"{len(parts)} parts of {sum(sizes)} bytes in all came in {nbytes} bytes")


def cut(memory: memoryview, parts: Sequence[tuple[PartId, int]]) -> list[tuple[PartId, memoryview]]:
    """Cut `memory` into the bytes of each of `parts`, which lie one after the other with the given sizes.

    Raises:
        QueueError: the parts do not fill `memory`.
    """
    check_filled(len(memory), parts)
    ends = accumulate(size for _, size in parts)
    return [(part, memory[end - size : end]) for (part, size), end in zip(parts, ends, strict=True)]


def check_once(parts: Sequence[tuple[PartId, object]]) -> None:
    """Check that each of `parts` is named once.

    Raises:
        QueueError: a part is named twice.
    """
    if len(dict(parts)) < len(parts):
        [(twice, _)] = Counter(part for part, _ in parts).most_common(1)
        raise QueueError(f"{twice} was named twice in one write; a part is written once")


def stale(part: PartId) -> StaleRowError:
    """Return the error for a part that is not stored."""
    return StaleRowError(f"{part} is not stored (any more): its row has left, or another write of it counts")
