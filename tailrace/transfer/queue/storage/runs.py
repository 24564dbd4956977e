"""The free runs of bytes in a file.

    free ──▶ coalesced with the free runs before and after it ──▶ allocate: the smallest run that is long enough

Runs are found by their ends in O(1), and by their length in O(log n), by binary search.
"""

from collections.abc import Iterable

from sortedcontainers import SortedDict


class Runs:
    """The free runs of bytes in one address space: none at first. The caller remembers the bytes that are taken."""

    def __init__(self, *, align: int = 1) -> None:
        """`align`: `allocate` returns multiples of it. Runs themselves may begin and end anywhere."""
        self._align = align
        self._ends: dict[int, int] = {}
        """The end of each free run by its start. Two runs are never adjacent."""
        self._starts: dict[int, int] = {}
        """The start of each free run by its end."""
        self._by_length = SortedDict()
        """The starts of runs, as keys of a dict, by the length that is left from the first aligned address."""

    def allocate(self, size: int) -> int | None:
        """Take `size` bytes (at least 1) from the smallest run that holds them. None: no run does."""
        place = self._by_length.bisect_left(size)
        if place == len(self._by_length):
            return None
        starts: dict[int, None] = self._by_length.peekitem(place)[1]
        start = next(reversed(starts))
        end = self._remove(start)
        address = self._aligned(start)
        self._add(start, address)
        self._add(address + size, end)
        return address

    def free(self, start: int, size: int) -> None:
        """Add free bytes: bytes that were taken, or new ones."""
        if not size:
            return
        end = start + size
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        if end in self._ends:
            end = self._remove(end)
        self._add(start, end)

    def free_all(self, runs: Iterable[tuple[int, int]]) -> None:
        """Add many free runs (start, size). Adjacent ones are joined first."""
        start = end = 0
        for begin, size in sorted(runs):
            if begin != end:
                self.free(start, end - start)
                start = begin
            end = begin + size
        self.free(start, end - start)

    def is_free(self, start: int, size: int) -> bool:
        """Whether these bytes are one whole free run."""
        return self._ends.get(start) == start + size

    def withdraw(self, start: int) -> None:
        """Take the whole free run that begins at `start`."""
        self._remove(start)

    def _aligned(self, address: int) -> int:
        return -(-address // self._align) * self._align

    def _add(self, start: int, end: int) -> None:
        if start == end:
            return
        self._ends[start] = end
        self._starts[end] = start
        if (length := end - self._aligned(start)) > 0:
            self._by_length.setdefault(length, {})[start] = None

    def _remove(self, start: int) -> int:
        end = self._ends.pop(start)
        del self._starts[end]
        if (length := end - self._aligned(start)) > 0:
            starts = self._by_length[length]
            del starts[start]
            if not starts:
                del self._by_length[length]
        return end
