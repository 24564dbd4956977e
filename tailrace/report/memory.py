"""The chart of the workers' memory by purpose, below the timeline (PolyTrace, figure 23)."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tailrace.config.base import GIB
from tailrace.events import Event
from tailrace.registers.events import ORANGE, EventKind
from tailrace.registers.phases import PURPOSES
from tailrace.report.run_data import RunData
from tailrace.report.workers import worker_of, worker_order

_POINTS = 2_000
"""Maximum number of points of a line; beyond that a point is the most of several."""


def memory_chart(run: RunData) -> dict[str, Any] | None:
    """Return the data that the page's script draws: for each worker, the times and the GiB of each purpose.

    Return None where the run has recorded no memory.
    """
    by_worker: dict[str, list[Event]] = defaultdict(list)
    for event in run.of(EventKind.MEMORY):
        by_worker[worker_of(event)].append(event)
    if not by_worker:
        return None
    charts = [_chart(worker, by_worker[worker]) for worker in sorted(by_worker, key=worker_order)]
    queue = [event for event in run.of(EventKind.QUEUE) if "bytes" in event.metrics]
    return {"workers": [*charts, *([_queue_chart(queue)] if queue else [])]}


def _chart(worker: str, events: Sequence[Event]) -> dict[str, Any]:
    areas = [
        {"name": entry.title, "colour": entry.colour, "gib": values}
        for purpose, entry in PURPOSES.items()
        if any(values := _gib(events, purpose))
    ]
    measured = [event for event in events if "host" in event.metrics]
    host = {"time": _times(measured), "gib": _gib(measured, "host")} if measured else None
    return {"name": worker, "time": _times(events), "areas": areas, "host": host}


def _queue_chart(events: Sequence[Event]) -> dict[str, Any]:
    cells = {"name": "cells of the queue's rows", "colour": ORANGE, "gib": _gib(events, "bytes")}
    return {"name": "queue", "time": _times(events), "areas": [cells], "host": None}


def _times(events: Sequence[Event]) -> list[float]:
    return [round(block[-1].end, 3) for block in _blocks(events)]


def _gib(events: Sequence[Event], name: str) -> list[float]:
    return [round(max(event.metrics.get(name, 0.0) for event in block) / GIB, 6) for block in _blocks(events)]


def _blocks(events: Sequence[Event]) -> list[Sequence[Event]]:
    size = max(1, math.ceil(len(events) / _POINTS))
    return [events[first : first + size] for first in range(0, len(events), size)]
