"""Parts in the memory of the unit's process: the default, and the fake for tests.

    reserve ──▶ a buffer ──commit: one copy of each part──▶ bytes

Each part has bytes of its own, so dropping one frees its memory whatever else came in the same write.
"""

from collections.abc import Iterable, Iterator, Sequence

from tailrace.transfer.queue.storage.base import (
    PartId,
    Place,
    Storage,
    fresh_parts,
    stale,
)


class MemoryStorage(Storage):
    """See `Storage` for the contract. What `read` returned stays good even when the part is dropped."""

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes`: of parts and reserved places together."""
        super().__init__(max_bytes=max_bytes)
        self._parts: dict[PartId, bytes] = {}

    def commit(self, place: Place, parts: Sequence[tuple[PartId, int]]) -> None:
        """See `Storage.commit`."""
        memory = self._reserved.memory(place)
        for part, where in fresh_parts(self, memory, parts):
            self._parts[part] = bytes(memory[where])
            self._stored += where.stop - where.start
        self._reserved.remove(place)

    def read(self, part: PartId) -> memoryview:
        """See `Storage.read`."""
        if part not in self._parts:
            raise stale(part)
        return memoryview(self._parts[part])

    def drop(self, parts: Iterable[PartId]) -> None:
        """See `Storage.drop`."""
        for part in parts:
            self._stored -= len(self._parts.pop(part, b""))

    def parts(self) -> Iterator[PartId]:
        """See `Storage.parts`."""
        return iter(list(self._parts))

    def __contains__(self, part: PartId) -> bool:
        """See `Storage.__contains__`."""
        return part in self._parts

    def close(self) -> None:
        """See `Storage.close`."""
        self._parts.clear()
        self._stored = 0
