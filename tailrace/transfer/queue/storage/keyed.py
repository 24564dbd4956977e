"""Storage in any store of bytes by keys, such as one that somebody else wrote; see docs/adapters.md.

bytes of the caller ──put──▶ <name>:<slot>:<generation>:<tag>   the bytes of each part
"""

from collections.abc import Sequence
from typing import Protocol

from tailrace.transfer.queue.storage.base import PartBatch, PartId
from tailrace.transfer.queue.storage.served import ServedStorage, key_of


class KeyedBytes(Protocol):
    """A store of bytes by keys. One thread uses it. Each call has a limit of time of its own."""

    def put(self, items: Sequence[tuple[str, memoryview]]) -> None:
        """Keep copies of bytes, each under a key that is not stored. Keys that were put before an error may stay.

        Raises:
            StorageFull: there is no room now.
            QueueError: the store has failed.
        """
        ...

    def get(self, keys: Sequence[str]) -> Sequence[bytes | memoryview | None]:
        """Return the bytes under each key; None where the store has lost them.

        Raises:
            QueueError: the store has failed.
        """
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Forget what is stored under these keys. Some may be missing.

        Raises:
            QueueError: the store has failed.
        """
        ...

    def close(self) -> None:
        """Release memory and connections."""
        ...


class KeyedStorage(ServedStorage):
    """A `Storage` in a store of bytes by keys."""

    def __init__(self, keyed: KeyedBytes, *, name: str, max_bytes: int) -> None:
        """`name`: begins all keys. `max_bytes`: the most bytes of all parts together."""
        super().__init__(max_bytes=max_bytes)
        self._keyed = keyed
        self._name = name

    def store(self, written: Sequence[tuple[PartBatch, memoryview]]) -> None:
        """See `Storage.store`."""
        fresh = self._new(written)
        full = [(part, memory) for part, memory in fresh if memory.nbytes]  # not every store keeps empty bytes
        try:
            if full:
                self._keyed.put([(self._key(part), memory) for part, memory in full])
        except BaseException:
            self._keyed.remove([self._key(part) for part, _ in full])
            raise
        self._sizes.update((part, memory.nbytes) for part, memory in fresh)
        self._stored += sum(memory.nbytes for _, memory in fresh)

    def close(self) -> None:
        """See `Storage.close`."""
        self.drop(self.parts())
        self._keyed.close()

    def _fetch(self, parts: Sequence[PartId]) -> Sequence[bytes | memoryview | None]:
        full = [part for part in dict.fromkeys(parts) if self._sizes[part]]
        found = dict(zip(full, self._keyed.get(list(map(self._key, full))) if full else (), strict=True))
        return [found.get(part, b"") for part in parts]

    def _remove(self, parts: Sequence[PartId]) -> None:
        if full := [self._key(part) for part in parts if self._sizes[part]]:
            self._keyed.remove(full)

    def _key(self, part: PartId) -> str:
        return f"{self._name}:{key_of(part)}"
