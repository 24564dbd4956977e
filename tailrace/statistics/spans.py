"""Spans of time: pairs of a start and an end, in seconds."""

from collections.abc import Iterable


def covered_s(spans: Iterable[tuple[float, float]], since: float = float("-inf")) -> float:
    """Return the seconds after `since` that at least one of the spans covers."""
    seconds, until = 0.0, since
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    return seconds
