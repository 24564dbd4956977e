"""The base of storages whose bytes another program keeps. This process remembers the parts and their sizes."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from tailrace.transfer.queue.storage.base import PartId, Storage, stale


class ServedStorage(Storage):
    """A `Storage` in another program. The bytes that `read` returned stay valid after the part is dropped."""

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes`: the most bytes of all parts together."""
        super().__init__(max_bytes=max_bytes)
        self._sizes: dict[PartId, int] = {}

    def read(self, part: PartId) -> memoryview:
        """See `Storage.read`."""
        return self.read_many([part])[0]

    def read_many(self, parts: Sequence[PartId]) -> list[memoryview]:
        """See `Storage.read_many`. This asks the other program once for all parts."""
        for part in parts:
            if part not in self._sizes:
                raise stale(part)
        found = self._fetch(parts) if parts else []
        lost = [part for part, stored in zip(parts, found, strict=True) if stored is None]
        if lost:
            self.drop(lost)
            self._look_again()
            raise stale(lost[0])
        return [memoryview(stored).toreadonly() for stored in found if stored is not None]

    def drop(self, parts: Iterable[PartId]) -> None:
        """See `Storage.drop`."""
        known = [part for part in dict.fromkeys(parts) if part in self._sizes]
        if known:
            self._remove(known)
        for part in known:
            self._stored -= self._sizes.pop(part)

    def parts(self) -> Iterator[PartId]:
        """See `Storage.parts`."""
        return iter(list(self._sizes))

    def __contains__(self, part: PartId) -> bool:
        """See `Storage.__contains__`."""
        return part in self._sizes

    @abstractmethod
    def _fetch(self, parts: Sequence[PartId]) -> Sequence[bytes | memoryview | None]:
        """The bytes of parts, one or more; None for each that was lost."""

    @abstractmethod
    def _remove(self, parts: Sequence[PartId]) -> None:
        """Have parts, one or more, forgotten."""

    def _look_again(self) -> None:
        """Look what is left, after some parts were lost; nothing by default."""


def key_of(part: PartId) -> str:
    """The key of a part, without the name of its storage."""
    return f"{part.slot}:{part.generation}:{part.tag}"
