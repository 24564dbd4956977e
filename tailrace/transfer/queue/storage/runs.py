"""Which bytes of a file are free.

    free ──▶ coalesced with the free runs before and after it ──▶ allocate: the smallest run that is long enough

Both are O(log n): the runs are found by their ends, and by their length in a tree of bitmaps over the lengths.
"""

from collections.abc import Iterable

_BITS = 8
_LEVELS = 6
"""Lengths below 2^48."""


class Runs:
    """Free runs of bytes in one space of addresses, none at first. What is taken is the caller's to remember."""

    def __init__(self, *, align: int = 1) -> None:
        """`align`: what `allocate` returns is a multiple of it. Runs themselves may begin and end anywhere."""
        self._align = align
        self._ends: dict[int, int] = {}
        """End of each free run by its start; two of them never touch."""
        self._starts: dict[int, int] = {}
        self._by_length: dict[int, dict[int, None]] = {}
        """Starts of the runs by the length that is left from the first aligned address on."""
        self._lengths = _Lengths()

    def allocate(self, size: int) -> int | None:
        """Take `size` bytes (at least 1) out of the smallest run that holds them; None where none does."""
        length = self._lengths.at_least(size)
        if length is None:
            return None
        bucket = self._by_length[length]
        start, _ = bucket.popitem()
        bucket[start] = None
        end = self._remove(start)
        address = self._aligned(start)
        self._add(start, address)
        self._add(address + size, end)
        return address

    def free(self, start: int, size: int) -> None:
        """Give back bytes that are taken, or bring new ones."""
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
        """`free` of many (start, size); those that touch are joined first."""
        start = end = 0
        for begin, size in sorted(runs):
            if begin != end:
                self.free(start, end - start)
                start = begin
            end = begin + size
        self.free(start, end - start)

    def is_free(self, start: int, size: int) -> bool:
        """Whether exactly these bytes are a free run."""
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
            self._lengths.add(length)

    def _remove(self, start: int) -> int:
        end = self._ends.pop(start)
        del self._starts[end]
        if (length := end - self._aligned(start)) > 0:
            bucket = self._by_length[length]
            del bucket[start]
            if not bucket:
                del self._by_length[length]
                self._lengths.remove(length)
        return end


class _Lengths:
    """A set of ints from 1 up to 2^48 - 1 that finds the smallest one from some int on.

    Bit i of word w of level 0 says that w * 2^8 + i is in the set; a bit of the next level says that its word is not 0.
    """

    def __init__(self) -> None:
        self._levels: list[dict[int, int]] = [{} for _ in range(_LEVELS)]

    def add(self, length: int) -> None:
        """Add an int; it may be there."""
        assert length < 1 << _BITS * _LEVELS, length
        for level in self._levels:
            word, bit = _split(length)
            known = level.get(word, 0)
            level[word] = known | 1 << bit
            if known:
                return
            length = word

    def remove(self, length: int) -> None:
        """Remove an int that is there."""
        for level in self._levels:
            word, bit = _split(length)
            level[word] ^= 1 << bit
            if level[word]:
                return
            del level[word]
            length = word

    def at_least(self, length: int) -> int | None:
        """The smallest int of the set that is not below `length`."""
        for depth, level in enumerate(self._levels):
            word, bit = _split(length)
            if above := level.get(word, 0) >> bit:
                return self._first_below(length + _lowest(above), depth)
            length = word + 1
        return None

    def _first_below(self, index: int, depth: int) -> int:
        for level in reversed(self._levels[:depth]):
            index = index << _BITS | _lowest(level[index])
        return index


def _split(index: int) -> tuple[int, int]:
    return index >> _BITS, index & (1 << _BITS) - 1


def _lowest(word: int) -> int:
    return (word & -word).bit_length() - 1
