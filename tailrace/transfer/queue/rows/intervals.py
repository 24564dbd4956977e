"""Integers that were seen, kept as ranges: what comes nearly in sequence costs nearly nothing."""

from bisect import bisect_right
from collections.abc import Iterable


class Intervals:
    """A set of integers that only grows."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """`ranges`: ascending and apart, the end not included."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, number: int) -> bool:
        """Whether it was added."""
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._ends[place]

    def add(self, number: int) -> None:
        """Add one; twice is harmless."""
        place = bisect_right(self._starts, number)
        if place and number < self._ends[place - 1]:
            return
        joins_left = place > 0 and self._ends[place - 1] == number
        joins_right = place < len(self._starts) and self._starts[place] == number + 1
        if joins_left and joins_right:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif joins_left:
            self._ends[place - 1] += 1
        elif joins_right:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number + 1)

    def ranges(self) -> list[tuple[int, int]]:
        """What `Intervals` takes."""
        return list(zip(self._starts, self._ends, strict=True))
