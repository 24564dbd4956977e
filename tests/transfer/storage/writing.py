"""Parts whose contents do not matter."""

from collections.abc import Iterable

from tailrace.transfer.queue.storage.base import PartId, Storage


def store(storage: Storage, parts: Iterable[tuple[PartId, bytes | memoryview]]) -> None:
    """In one write."""
    storage.store([(part, memoryview(content)) for part, content in parts])
