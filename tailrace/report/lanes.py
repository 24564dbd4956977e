"""Spans that overlap in time, put side by side."""

import heapq
from collections.abc import Iterable
from typing import Protocol


class Span(Protocol):
    """Anything with a start and an end, in any one unit of time."""

    @property
    def start(self) -> float:
        """The time at which it began."""

    @property
    def end(self) -> float:
        """The time at which it ended; not before `start`."""


def assign_lanes(spans: Iterable[Span]) -> list[int]:
    """Return the lane of each span, in the order given: no two spans of a lane overlap, and low lanes fill first.

    A span may begin in the instant in which its lane's last one ended. The number of lanes is minimal: it is the
    largest number of spans at one time.
    """
    ordered = sorted(enumerate(spans), key=lambda item: (item[1].start, item[1].end))
    lanes = [0] * len(ordered)
    busy: list[tuple[float, int]] = []  # when a lane is free again, and the lane
    free: list[int] = []
    for index, span in ordered:
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        lanes[index] = lane
        heapq.heappush(busy, (span.end, lane))
    return lanes
