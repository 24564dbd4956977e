"""The order in which an engine starts its requests: priorities for `Request.priority`, the larger first."""

import math
from collections.abc import Sequence

from tailrace.config.rollout import Order

SCOUT = 1e8
"""The priority of a sample whose length tells that of the others of its group."""


_STEP = 1e9
"""By so much the priorities of one training step are above those of the next."""


def in_engine(priority: float, step: int | None) -> float:
    """The priority inside an engine of a request with such a priority among those of its training step.

    Requests of no step begin before all others.
    """
    return priority - _STEP * (-1 if step is None else step)


def priority(expected_tokens: float, order: Order) -> float:
    """The priority of a request, of whose response so many tokens are expected."""
    match order:
        case "first_in":
            return first_in(1)[0]
        case "longest_first":
            return longest_first([expected_tokens])[0]
        case "shortest_first":
            return shortest_first([expected_tokens])[0]


def first_in(count: int) -> list[float]:
    """Priorities of `count` requests that start in the order of arrival."""
    return [0.0] * count


def longest_first(expected_tokens: Sequence[float]) -> list[float]:
    """Priorities by which the request with the longest expected response starts first.

    Longest-processing-time-first: where more requests wait than decode together, no long one is left for the end. The
    makespan is at most 4/3 of the best one if the expectations are right (StreamRL, section 5.3, Scheduling Order,
    after Graham 1969).

    Args:
        expected_tokens: of each request's response, from any source; only their order counts.

    Raises:
        ValueError: an expectation is not a finite number, and so has no place in an order.
    """
    for index, tokens in enumerate(expected_tokens):
        if not math.isfinite(tokens):
            raise ValueError(f"expected_tokens[{index}] is {tokens}; give a finite number of tokens")
    return [float(tokens) for tokens in expected_tokens]


def shortest_first(expected_tokens: Sequence[float]) -> list[float]:
    """Priorities by which the request with the shortest expected response starts first.

    The mean time until a response has ended is the least, and the last one ends late.

    Raises:
        ValueError: see `longest_first`.
    """
    return [-priority for priority in longest_first(expected_tokens)]
