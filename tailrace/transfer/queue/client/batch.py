"""Measured rows in the order in which they travel.

parts ──▶ runs: consecutive rows with cells in the same columns ──▶ a frame for each run, or one piece of memory
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from tailrace.transfer.queue.cells import Part, write_rows
from tailrace.transfer.queue.wire.frames import MAX_FRAME_BYTES
from tailrace.transfer.queue.wire.messages import Run, pack


class Batch:
    """Parts for some rows, to be written to one unit or several. Its arrays are the caller's until it has been."""

    def __init__(self, parts: Sequence[Part], *, frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """`frame_bytes`: of one run at the most, but for one of a single row."""
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)
        self._runs = _split(parts, frame_bytes)

    @cached_property
    def runs(self) -> list[Run]:
        """Of all rows, in their order."""
        return [_run(self._parts[where]) for where in self._runs]

    @cached_property
    def frames(self) -> list[memoryview]:
        """One for each run: its parts, one after the other."""
        frames = []
        for where in self._runs:
            parts = self._parts[where]
            frame = np.empty(sum(part.nbytes for part in parts), np.uint8).data
            write_rows(parts, frame)
            frames.append(frame)
        return frames

    def write(self, memory: memoryview) -> None:
        """Write all parts one after the other to `memory`: `nbytes` writable bytes."""
        write_rows(self._parts, memory)

    def take(self, places: Sequence[int]) -> "Batch":
        """The rows at these places."""
        return self if len(places) == len(self._parts) else Batch([self._parts[place] for place in places])


def _split(parts: Sequence[Part], frame_bytes: int) -> list[slice]:
    runs: list[slice] = []
    columns: tuple[str, ...] | None = None
    nbytes = 0
    for place, part in enumerate(parts):
        nbytes += part.nbytes
        if (own := tuple(part.lengths)) == columns and nbytes <= frame_bytes:
            runs[-1] = slice(runs[-1].start, place + 1)
        else:
            runs.append(slice(place, place + 1))
            columns, nbytes = own, part.nbytes
    return runs


def _run(parts: Sequence[Part]) -> Run:
    columns = list(parts[0].lengths)
    lengths = np.array([list(part.lengths.values()) for part in parts], np.int64)
    return Run(len(parts), columns, pack(lengths))
