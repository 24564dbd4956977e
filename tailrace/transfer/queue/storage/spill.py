"""Storage in memory up to a budget, and in a file beyond it.

    bytes of the caller ──store──▶ bytes ──more than the budget: least recently written first──▶ file

The file has no name: it disappears with the process, however that ends. Its freed runs are used again. A part in the
file is read from there and does not return to memory, since each task mostly reads a row once.
"""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tailrace.errors import QueueError, StorageFull
from tailrace.transfer.queue.storage.base import PartBatch, PartId, Storage, stale
from tailrace.transfer.queue.storage.runs import Runs


class SpillStorage(Storage):
    """A `Storage` in memory and a file. The bytes that `read` returned stay valid after the part is dropped."""

    def __init__(self, *, directory: Path, memory_bytes: int, max_bytes: int) -> None:
        """`directory`: for the file. `max_bytes`: the most bytes of all parts. `memory_bytes`: the most in memory.

        Raises:
            QueueError: the file cannot be made in `directory`.
        """
        super().__init__(max_bytes=max_bytes)
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise QueueError(f"parts cannot spill to {directory}: {error.strerror}") from None
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._memory: OrderedDict[PartId, bytes] = OrderedDict()
        self._file_parts: dict[PartId, tuple[int, int]] = {}
        """The offset and size of each part in the file."""
        self._in_file = 0
        """The bytes of the parts in the file."""
        self._runs = Runs()
        self._file_end = 0

    def store(self, written: Sequence[tuple[PartBatch, memoryview]]) -> None:
        """See `Storage.store`."""
        parts = self._new(written)
        for part, memory in parts:
            self._memory[part] = bytes(memory)
            self._stored += memory.nbytes
        try:
            self._spill()
        except StorageFull:
            self.drop(part for part, _ in parts)
            raise

    def read(self, part: PartId) -> memoryview:
        """See `Storage.read`."""
        if part in self._memory:
            return memoryview(self._memory[part])
        if part in self._file_parts:
            return memoryview(self._read_file(*self._file_parts[part])).toreadonly()
        raise stale(part)

    def drop(self, parts: Iterable[PartId]) -> None:
        """See `Storage.drop`."""
        runs = []
        for part in parts:
            self._stored -= len(self._memory.pop(part, b""))
            runs.append(self._file_parts.pop(part, (0, 0)))
        freed = sum(size for _, size in runs)
        self._in_file -= freed
        self._stored -= freed
        self._runs.free_all(run for run in runs if run[1])

    def parts(self) -> Iterator[PartId]:
        """See `Storage.parts`."""
        return iter([*self._memory, *self._file_parts])

    def __contains__(self, part: PartId) -> bool:
        """See `Storage.__contains__`."""
        return part in self._memory or part in self._file_parts

    def close(self) -> None:
        """See `Storage.close`."""
        self._file.close()
        self._memory.clear()
        self._file_parts.clear()

    def _spill(self) -> None:
        """Move parts to the file until the parts in memory are within the budget."""
        while self._stored - self._in_file > self._memory_bytes:
            part, stored = next(iter(self._memory.items()))
            self._file_parts[part] = (self._write_file(stored), len(stored))
            self._in_file += len(stored)
            del self._memory[part]

    def _write_file(self, stored: bytes) -> int:
        """Write the bytes of a part to the file. Return their offset."""
        if not stored:
            return 0
        offset = self._runs.allocate(len(stored))
        if offset is None:
            self._runs.free(self._file_end, len(stored))
            self._file_end += len(stored)
            offset = self._runs.allocate(len(stored))
            assert offset is not None, "the file has just grown by so much"
        rest = memoryview(stored)
        try:
            while rest:
                rest = rest[os.pwrite(self._file.fileno(), rest, offset + len(stored) - len(rest)) :]
        except OSError as error:
            self._runs.free(offset, len(stored))
            raise StorageFull(
                f"{len(stored)} bytes cannot be written to the file in {self._directory}: {error.strerror}; "
                f"make room there, or lower queue.storage.max_bytes"
            ) from None
        return offset

    def _read_file(self, offset: int, size: int) -> bytearray:
        stored = bytearray(size)
        rest = memoryview(stored)
        while rest:
            count = os.preadv(self._file.fileno(), [rest], offset + size - len(rest))
            assert count, f"the file ends before {offset + size}"
            rest = rest[count:]
        return stored
