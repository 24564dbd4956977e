"""Measured rows in the order in which they travel.

parts ──▶ runs: consecutive rows with cells in the same columns ──▶ a frame for each run, or one piece of memory
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from tailrace.transfer.queue.cells import Parts, write_rows
from tailrace.transfer.queue.messages import Run, pack
from tailrace.transfer.wire.frames import MAX_FRAME_BYTES


class Batch:
    """Parts for some rows, to be written to one unit or several. Its arrays are the caller's until it has been."""

    def __init__(self, parts: Iterable[Parts], *, frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """`frame_bytes`: at most so many in one run, except one of a single row."""
        self._parts = [piece for alike in parts for piece in _cut(alike, frame_bytes)]
        self.nbytes = sum(alike.nbytes for alike in self._parts)

    def __len__(self) -> int:
        """Rows."""
        return sum(map(len, self._parts))

    @cached_property
    def runs(self) -> list[Run]:
        """Of all rows, in their order."""
        return [Run(len(alike), list(alike.columns), pack(alike.lengths)) for alike in self._parts]

    @cached_property
    def frames(self) -> list[memoryview]:
        """One for each run: its parts, one after the other."""
        frames = []
        for alike in self._parts:
            frame = np.empty(alike.nbytes, np.uint8).data
            write_rows([alike], frame)
            frames.append(frame)
        return frames

    def write(self, memory: memoryview) -> None:
        """Write all parts one after the other to `memory`: `nbytes` writable bytes."""
        write_rows(self._parts, memory)

    def take(self, places: Sequence[int]) -> "Batch":
        """The rows at these places, which ascend."""
        if len(places) == len(self):
            return self
        taken, first = [], 0
        for alike in self._parts:
            own = [place - first for place in places if first <= place < first + len(alike)]
            taken += [alike.take(own)] if own else []
            first += len(alike)
        return Batch(taken)


def _cut(parts: Parts, frame_bytes: int) -> Iterator[Parts]:
    """Pieces of at most so many bytes, except one of a single row."""
    first, nbytes = 0, 0
    if parts.nbytes > frame_bytes:
        for place, size in enumerate(parts.sizes.tolist()):
            if place > first and nbytes + size > frame_bytes:
                yield parts.take(range(first, place))
                first, nbytes = place, 0
            nbytes += size
    yield parts.take(range(first, len(parts))) if first else parts
