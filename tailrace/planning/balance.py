"""Splits items into parts of nearly equal cost, such as the rows of a batch among ranks by their tokens.

Finding the best split, whose heaviest part is lightest, is NP-hard (multiprocessor scheduling). Differencing takes
O(n log n) steps for a given number of parts, and its bound is proven.

Costs are not negative. Equal costs are split the same way every time.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import count

_Part = tuple[float, list[int]]
"""The sum of the costs of some items, and the items."""


def partition(costs: Sequence[float], parts: int, *, equal_count: bool) -> list[list[int]]:
    """Split by the largest differencing method: items that are put into different parts leave only their difference.

    Each solution begins with one item, or, with `equal_count`, with as many as there are parts, neighbours by cost.
    The two solutions whose parts differ most are merged: the heaviest part of either with the lightest of the other.
    This is repeated until one solution is left.

    Karmarkar and Karp 1982, The Differencing Method of Set Partitioning. The heaviest part is at most 4/3 - 1/(3 parts)
    times that of the best split (Michiels, Korst, Aarts, van Leeuwen 2007). With `equal_count` it is at most
    2 - 1/parts times that of the best such split; and 4/3, 19/12, 103/60 or 643/360 times, for any number of parts,
    where the largest number of items in one is 3, 4, 5 or 6 (the same, STACS 2003).

    Args:
        costs: of each item.
        parts: how many; some are empty where there are fewer items.
        equal_count: whether the numbers of items in the parts may differ by one only.

    Returns:
        The items of each part, as places in `costs`, ascending; the heaviest part first.

    Raises:
        ValueError: `parts` is less than 1, or a cost is negative or not a finite number.
    """
    order = _heaviest_first(costs, parts)
    width = parts if equal_count else 1
    blocks = [order[start : start + width] for start in range(0, len(order), width)]
    best = _difference([[(costs[item], [item]) for item in block] for block in blocks] or [[]], parts)
    return [sorted(items) for _, items in _filled(best, parts)]


def _heaviest_first(costs: Sequence[float], parts: int) -> list[int]:
    if parts < 1:
        raise ValueError(f"parts is {parts}; items are split into at least 1")
    for item, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"costs[{item}] is {cost}; give a finite cost of 0 or more")
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)


def _filled(solution: list[_Part], parts: int) -> list[_Part]:
    """Add the empty parts of a solution, which are not kept, to those that it has: the heaviest first."""
    return solution + [(0, []) for _ in range(parts - len(solution))]


def _difference(solutions: Sequence[list[_Part]], parts: int) -> list[_Part]:
    """Merge the two solutions that differ most until one is left."""
    heap = [(-_spread(solution, parts), number, solution) for number, solution in enumerate(solutions)]
    heapq.heapify(heap)
    numbers = count(len(heap))
    while len(heap) > 1:
        merged = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2], parts)
        heapq.heappush(heap, (-_spread(merged, parts), next(numbers), merged))
    return heap[0][2]


def _spread(solution: Sequence[_Part], parts: int) -> float:
    if not solution:
        return 0.0
    return solution[0][0] - (solution[-1][0] if len(solution) == parts else 0)


def _merge(one: list[_Part], other: list[_Part], parts: int) -> list[_Part]:
    """Join the heaviest part of one with the lightest of the other, and so on. Both arguments are used up."""
    if len(one) + len(other) <= parts:  # each joins an empty one: most merges are such, where there are many parts
        merged = one + other[::-1]
    else:
        pairs = zip(_filled(one, parts), reversed(_filled(other, parts)), strict=True)
        merged = [(cost + light, _join(items, more) if more else items) for (cost, items), (light, more) in pairs]
    return sorted(merged, key=lambda part: part[0], reverse=True)


def _join(items: list[int], more: list[int]) -> list[int]:
    """Join two lists. The shorter one moves, so that an item moves at most log n times."""
    longer, shorter = (items, more) if len(items) >= len(more) else (more, items)
    longer.extend(shorter)
    return longer
