"""Copies of small cells at the controller: a claim's answer can hold them, so that nothing has to be fetched.

A put of a few KB brings its cells with its Admit, and the controller writes them to the units: one trip instead of two.
The controller keeps a copy until the row leaves. A claim of few such rows is answered with their cells. The units hold
the cells that count: where there is no copy, such as after a restart, the cell is read from a unit.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.messages import Inline, Run, pack
from tailrace.transfer.queue.policies.base import CellFacts

_MAX_BYTES = 64 * 2**20
"""The limit of all copies together; cells beyond it are not copied."""
_MAX_ROWS = 16
"""The most rows of a claim that is answered with cells; for more rows, reading from a unit is quicker."""


class InlineCells:
    """Copies of the parts that came with puts."""

    def __init__(self, codec: PartCodec) -> None:
        self._codec = codec
        self._parts: dict[RowId, tuple[CellFacts, bytes]] = {}
        self._nbytes = 0

    def add(self, rows: Sequence[RowId], facts: Sequence[CellFacts], sizes: Sequence[int], cells: bytes) -> None:
        """Copy the parts of `rows`, which lie one after the other in `cells`. `sizes`: bytes of each part."""
        if self._nbytes + len(cells) > _MAX_BYTES:
            return
        start = 0
        for row, row_facts, size in zip(rows, facts, sizes, strict=True):
            self._parts[row] = (row_facts, cells[start : start + size])
            start += size
        self._nbytes += len(cells)

    def drop(self, rows: Iterable[RowId]) -> None:
        """Drop the copies of rows that have left."""
        if not self._parts:
            return
        for row in rows:
            _, part = self._parts.pop(row, (None, b""))
            self._nbytes -= len(part)

    def read(self, rows: Sequence[RowId], columns: Sequence[str]) -> Inline | None:
        """The cells of these rows; None where there are too many rows, or one of them has no copy."""
        if len(rows) > _MAX_ROWS or not all(row in self._parts for row in rows):
            return None
        lengths, starts, parts, end = [], [], [], 0
        for row in rows:
            facts, part = self._parts[row]
            offsets = self._codec.layout(facts.lengths).offsets
            lengths.append([facts.lengths[column] for column in columns])
            starts.append([end + offsets[column] for column in columns])
            parts.append(part)
            end += len(part)
        return Inline(pack(np.array(lengths, np.int64)), pack(np.array(starts, np.int64)), b"".join(parts))


def cut(cells: bytes, runs: Sequence[Run], sizes: Sequence[int]) -> list[bytes]:
    """Cut `cells`, which lie one after the other, into a frame for each run. `sizes`: bytes of each row."""
    if len(runs) == 1:
        return [cells]
    frames, row, start = [], 0, 0
    for run in runs:
        end = start + sum(sizes[row : row + run.rows])
        frames.append(cells[start:end])
        row, start = row + run.rows, end
    return frames
