"""Where the seconds of a step bend over the batch size: chooses the sizes to measure, then those to keep.

Kernels work on several rows at a time, and take another way beyond some number of them. So the seconds of a step are
stairs and straight pieces over the batch size (PAT, figure 6 b), and a line between two sizes may be far off.

    few sizes ──middle of each two──▶ off the line? halves of it, and so on ──▶ measured sizes ──▶ those with a bend

Machines drift, by more within a second than many a bend. So all sizes are measured in sweeps, one after the other. Only
sizes of the same sweep are compared, and the median of all sweeps counts.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

SMALL = 8
"""All sizes up to this one are measured: with few sequences a bend is a large part of a step, and a step is short."""
CALM = 2
"""Times in a row that the middles of a span have to lie on the line before it is left alone: two bends may be so placed
that the middle between them lies on it.
"""

Sweeps = Sequence[Sequence[float]]
"""[sweep][arrangement] seconds of a size."""


def measure_bends(
    sweeps_of: Callable[[Sequence[int]], Mapping[int, Sweeps]],
    largest: int,
    *,
    tolerance: float,
    most: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Mapping[int, Sweeps]:
    """Measure the sizes that show where seconds bend, by bisection: the sweeps by size, from 1 to `largest`.

    A span between two sizes is halved until its middles are on the line. The size after a middle is measured as well,
    since stairs rise there: middles are multiples of powers of two, as the rows that kernels take at a time. All sizes
    are measured again with each halving.

    Args:
        sweeps_of: measures these sizes.
        tolerance: the part of the seconds from which on a middle is off the line.
        most: the most sizes to measure, beside the first few. The worst spans are halved first.
        goes_on: whether there is time for more.
    """
    found = sweeps_of(_first(largest))
    spans = [(0.0, first, last, 0) for first, last in pairwise(sorted(found))]
    """The error at the middle of which it is a part, the first and the last size, and how often it was calm."""
    while goes_on():
        room = most - len(found)
        halved: list[tuple[int, int, list[int], int]] = []
        for _, first, last, calm in sorted(spans, reverse=True):
            middle = _middle(first, last)
            inner = [size for size in (middle, middle + 1) if first < size < last]
            if inner and len(inner) <= room:
                room -= len(inner)
                halved.append((first, last, inner, calm))
        if not halved:
            break
        found = sweeps_of(sorted({*found, *(size for _, _, inner, _ in halved for size in inner)}))
        spans = []
        for first, last, inner, calm in halved:
            error = max(_error(found, first, last, size) for size in inner)
            calm = 0 if error > tolerance else calm + 1
            if calm < CALM:
                spans += [(error, start, end, calm) for start, end in pairwise([first, *inner, last])]
    return found


def bends_of(found: Mapping[int, Sweeps], *, tolerance: float, most: int) -> list[int]:
    """The sizes to keep, so that lines between them are near all that was measured: the worst are added first.

    Args:
        found: the sweeps by size.
        tolerance: the part of the seconds of a measured size by which a line may be off.
        most: the most sizes, 2 or more. The smallest and the largest are kept in any case.
    """
    kept = sorted({min(found), max(found)})
    while len(kept) < most:
        error, worst = max((error_at(found, kept, size), size) for size in found)
        if error <= tolerance:
            break
        kept.insert(bisect_left(kept, worst), worst)
    return kept


def error_at(found: Mapping[int, Sweeps], kept: Sequence[int], size: int) -> float:
    """The part of its seconds by which the line between the nearest sizes of `kept`, in order, is off at a size.

    That is in the median of the sweeps, less the standard error of their mean, under the worst arrangement.
    """
    place = bisect_left(kept, size)
    return 0.0 if kept[place] == size else _error(found, kept[place - 1], kept[place], size)


def _error(found: Mapping[int, Sweeps], first: int, last: int, size: int) -> float:
    share = (size - first) / (last - first)
    off = [
        [(low + share * (high - low)) / there - 1 for low, high, there in zip(*rows, strict=True)]
        for rows in zip(found[first], found[last], found[size], strict=True)
    ]
    return max(map(_beyond_chance, zip(*off, strict=True)))


def _beyond_chance(errors: Sequence[float]) -> float:
    chance = statistics.stdev(errors) / math.sqrt(len(errors)) if len(errors) > 1 else 0.0
    return max(0.0, abs(statistics.median(errors)) - chance)


def _first(largest: int) -> list[int]:
    """All up to `SMALL`, then powers of two and those in the middle of two powers."""
    sizes = set(range(1, SMALL + 1))
    sizes |= {factor << exponent for factor in (2, 3) for exponent in range(largest.bit_length())}
    return [*sorted(size for size in sizes if size < largest), largest]


def _middle(first: int, last: int) -> int:
    """The size about in the middle that is a multiple of the largest power of two."""
    step = 1 << max(0, (last - first).bit_length() - 2)
    return (first + last) // (2 * step) * step
