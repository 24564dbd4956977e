"""Small batches, packed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tailrace.transfer.queue.wire.calls import Batch
from tailrace.transfer.queue.wire.messages import NO_VERSION, Run, pack
from tailrace.types import IntArray


def ints(values: Any) -> IntArray:
    return np.array(values, dtype=np.int64)


def packed(values: Any) -> bytes:
    return pack(ints(values))


def batch(*cells: IntArray, first: int = 0) -> Batch:
    """New rows with `prompt_ids`, one for each cell."""
    rows = ints([[first + index, 1, 100 * (first + index)] for index in range(len(cells))])
    run = Run(len(cells), ["prompt_ids"], packed([[len(cell)] for cell in cells]))
    frame = np.concatenate(cells).data
    return Batch(rows, ints([NO_VERSION] * len(cells)), [run], [frame])


def cells_of(run: Run, frame: memoryview) -> Iterator[memoryview]:
    """The cells of int64 arrays in a frame, row by row."""
    data, start = memoryview(frame).cast("B"), 0
    for length in run.table().sum(axis=1).tolist():
        yield data[start : start + 8 * length]
        start += 8 * length
