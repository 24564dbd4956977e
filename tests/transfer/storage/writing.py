"""Parts whose contents do not matter."""

from collections.abc import Iterable

import numpy as np

from tailrace.transfer.queue.storage.base import PartBatch, PartId, Storage


def lengths_of(size: int) -> dict[str, int]:
    """The cell lengths that a part of `size` bytes is given."""
    return {"text": size} if size % 2 else {"number": 1, "text": size}


def batch(part: PartId, size: int) -> PartBatch:
    lengths = lengths_of(size)
    return PartBatch([part], list(lengths), np.array([list(lengths.values())]), [size])


def store(storage: Storage, parts: Iterable[tuple[PartId, bytes | memoryview]]) -> None:
    """Store all parts in one write."""
    storage.store([(batch(part, len(content)), memoryview(content)) for part, content in parts])


def found(storage: Storage) -> dict[PartId, tuple[int, dict[str, int]]]:
    """The parts left by an earlier storage: for each, its bytes and the lengths of its cells."""
    return {
        part: (size, dict(zip(batch.columns, lengths, strict=True)))
        for batch in storage.take_stock()
        for part, size, lengths in zip(batch.parts, batch.sizes, batch.lengths.tolist(), strict=True)
    }
