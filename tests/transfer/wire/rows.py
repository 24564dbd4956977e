"""Numbers and cells, packed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tailrace.transfer.queue.messages import Run, pack
from tailrace.types import IntArray


def ints(values: Any) -> IntArray:
    return np.array(values, dtype=np.int64)


def packed(values: Any) -> bytes:
    return pack(ints(values))


def cells_of(run: Run, frame: memoryview) -> Iterator[memoryview]:
    """The cells of int64 arrays in a frame, row by row."""
    data, start = memoryview(frame).cast("B"), 0
    for length in run.table().sum(axis=1).tolist():
        yield data[start : start + 8 * length]
        start += 8 * length
