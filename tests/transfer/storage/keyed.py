"""A store of bytes in a dict."""

from collections.abc import Sequence


class DictOfBytes:
    """See `KeyedBytes`."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}

    def put(self, items: Sequence[tuple[str, memoryview]]) -> None:
        for key, memory in items:
            assert key not in self.items
            self.items[key] = bytes(memory)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.items.get(key) for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.items.pop(key, None)

    def close(self) -> None:
        """Nothing is open."""
