"""Storage in any store of bytes by keys, such as one that somebody else wrote; see docs/adapters.md.

bytes of the caller ──put──▶ <name>:<slot>:<generation>:<tag>   the bytes of each part
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tailrace.transfer.queue.storage.base import PartBatch, PartId, Storage, stale


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


class KeyedStorage(Storage):
    """A `Storage` in a store of bytes by keys. The bytes that `read` returned stay valid after the part is dropped."""

    def __init__(self, keyed: KeyedBytes, *, name: str, max_bytes: int) -> None:
        """`name`: begins all keys. `max_bytes`: the most bytes of all parts together."""
        super().__init__(max_bytes=max_bytes)
        self._keyed = keyed
        self._name = name
        self._sizes: dict[PartId, int] = {}

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

    def read(self, part: PartId) -> memoryview:
        """See `Storage.read`."""
        return self.read_many([part])[0]

    def read_many(self, parts: Sequence[PartId]) -> list[memoryview]:
        """See `Storage.read_many`. This asks the store once for all parts."""
        for part in parts:
            if part not in self._sizes:
                raise stale(part)
        full = [part for part in dict.fromkeys(parts) if self._sizes[part]]
        found = dict(zip(full, self._keyed.get(list(map(self._key, full))) if full else (), strict=True))
        lost = [part for part, stored in found.items() if stored is None]
        if lost:
            self.drop(lost)
            raise stale(lost[0])
        return [memoryview(found.get(part) or b"").toreadonly() for part in parts]

    def drop(self, parts: Iterable[PartId]) -> None:
        """See `Storage.drop`."""
        known = [part for part in dict.fromkeys(parts) if part in self._sizes]
        if full := [self._key(part) for part in known if self._sizes[part]]:
            self._keyed.remove(full)
        for part in known:
            self._stored -= self._sizes.pop(part)

    def parts(self) -> Iterator[PartId]:
        """See `Storage.parts`."""
        return iter(list(self._sizes))

    def __contains__(self, part: PartId) -> bool:
        """See `Storage.__contains__`."""
        return part in self._sizes

    def close(self) -> None:
        """See `Storage.close`."""
        self.drop(self.parts())
        self._keyed.close()

    def _key(self, part: PartId) -> str:
        return f"{self._name}:{part.slot}:{part.generation}:{part.tag}"
