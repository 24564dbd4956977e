"""Where the seconds of a step bend over the batch size: chooses the sizes to measure, then those to keep.

Kernels work on several rows at a time, and take another way beyond some number of them. So the seconds of a step are
stairs and straight pieces over the batch size (PAT, figure 6 b), and a line between two sizes may be far off.

    few sizes ──middle of each two──▶ off the line? halves of it, and so on ──▶ measured sizes ──▶ those with a bend

Several arrangements are measured at each size, so seconds are a row of numbers. The worst of them counts.
"""

import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise

SMALL = 8
"""All sizes up to this one are measured: with few sequences a bend is a large part of a step, and a step is short."""
CALM = 2
"""Times in a row that the middles of a span have to lie on the line before it is left alone: two bends may be so placed
that the middle between them lies on it.
"""

Row = Sequence[float]


def measure_bends(
    seconds_of: Callable[[int], Row],
    largest: int,
    *,
    tolerance: float,
    most: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[int, Row]:
    """Measure the sizes that show where seconds bend, by bisection: seconds by size, from 1 to `largest`.

    A span between two measured sizes is halved where its middle is off the line, the worst span first. The size after a
    middle is measured as well, since stairs rise there: middles are multiples of powers of two, as the rows that
    kernels take at a time.

    Args:
        seconds_of: measures a size.
        tolerance: the part of the seconds from which on a middle is off the line.
        most: the most sizes to measure, beside the first few.
        goes_on: whether there is time for more.
    """
    found = {size: seconds_of(size) for size in _first(largest)}
    spans: list[tuple[float, int, int, int]] = []
    """Negative error at the middle of which it is a part, first and last size, and how often it was calm."""
    for first, last in pairwise(sorted(found)):
        heappush(spans, (0.0, first, last, 0))
    while spans and len(found) < most and goes_on():
        _, first, last, calm = heappop(spans)
        middle = _middle(first, last)
        inner = [size for size in (middle, middle + 1) if first < size < last]
        if not inner:
            continue
        found |= {size: seconds_of(size) for size in inner}
        error = max(_error(found, first, last, size) for size in inner)
        calm = 0 if error > tolerance else calm + 1
        if calm < CALM:
            for start, end in pairwise([first, *inner, last]):
                heappush(spans, (-error, start, end, calm))
    return found


def bends_of(seconds: Mapping[int, Row], *, tolerance: float, most: int) -> list[int]:
    """The sizes to keep, so that lines between them are near all that was measured: the worst are added first.

    Args:
        seconds: by size.
        tolerance: the part of the seconds of a measured size by which a line may be off.
        most: the most sizes, 2 or more. The smallest and the largest are kept in any case.
    """
    kept = sorted({min(seconds), max(seconds)})
    while len(kept) < most:
        error, worst = max((error_at(seconds, kept, size), size) for size in seconds)
        if error <= tolerance:
            break
        kept.insert(bisect_left(kept, worst), worst)
    return kept


def error_at(seconds: Mapping[int, Row], kept: Sequence[int], size: int) -> float:
    """The part of its seconds by which the line between the nearest sizes of `kept`, in order, is off at a size."""
    place = bisect_left(kept, size)
    return 0.0 if kept[place] == size else _error(seconds, kept[place - 1], kept[place], size)


def noise(seconds: Sequence[Row]) -> float:
    """The part by which measurements of the same size differ: the range over the least, in the median column."""
    spreads: list[float] = [max(column) / min(column) - 1 for column in zip(*seconds, strict=True)]
    return statistics.median(spreads)


def _error(seconds: Mapping[int, Row], first: int, last: int, size: int) -> float:
    share = (size - first) / (last - first)
    columns = zip(seconds[first], seconds[last], seconds[size], strict=True)
    return max(abs(low + share * (high - low) - there) / there for low, high, there in columns)


def _first(largest: int) -> list[int]:
    """All up to `SMALL`, then powers of two and those in the middle of two powers."""
    sizes = set(range(1, SMALL + 1))
    sizes |= {factor << exponent for factor in (2, 3) for exponent in range(largest.bit_length())}
    return [*sorted(size for size in sizes if size < largest), largest]


def _middle(first: int, last: int) -> int:
    """The size about in the middle that is a multiple of the largest power of two."""
    step = 1 << max(0, (last - first).bit_length() - 2)
    return (first + last) // (2 * step) * step
