"""Storage in the memory of the unit's process; also the fake for tests.

    bytes of the caller ──store: one copy of each part──▶ bytes

Each part is a separate bytes object, so a drop frees its memory even if other parts of the same write stay.
"""

from collections.abc import Iterable, Iterator, Sequence

from tailrace.transfer.queue.storage.base import PartBatch, PartId, Storage, stale


class MemoryStorage(Storage):
    """A `Storage` in memory. The bytes that `read` returned stay valid after the part is dropped."""

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes`: the most bytes of all parts together."""
        super().__init__(max_bytes=max_bytes)
        self._parts: dict[PartId, bytes] = {}

    def store(self, written: Sequence[tuple[PartBatch, memoryview]]) -> None:
        """See `Storage.store`."""
        copies = {part: bytes(memory) for part, memory in self._new(written)}
        self._parts |= copies
        self._stored += sum(map(len, copies.values()))

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
