"""The timeline of the page: a row for each actor of each worker.

Only a few steps show at a time, so that a long run does not freeze a browser.
"""

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tailrace.events import Event
from tailrace.registers.events import title
from tailrace.report.figures import task_colours
from tailrace.report.lanes import assign_lanes
from tailrace.report.run_data import RunData, shown_step
from tailrace.report.text import duration
from tailrace.report.workers import mark_text, row_name, row_of, row_order, weight_flights, worker_of

STEPS_SHOWN = 3
"""Number of steps in one window of the timeline."""
MAX_SPANS = 8_000
"""Maximum number of spans on the page; the windows of a longer run are thinned out."""

_ROW, _LANE, _LANES = 1.0, 0.2, 14.0
"""Heights of a row, of the lane of one response, and of all such lanes together at most."""
_TALLEST = 2.0
"""Maximum height of a worker's row in which other work overlaps, since there may be many workers."""
_PIXELS, _MARGIN = 30, 110
_BEFORE = "before training"
"""The window before the first step."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the run that the timeline shows at once, in seconds."""

    label: str
    start: float
    end: float


def timeline(run: RunData) -> dict[str, Any] | None:
    """Return the data that the page's script draws: rows, the spans of each task, and the windows to choose from.

    Return None where the run has no spans.
    """
    events = [*run.spans, *weight_flights(run.events)]
    if not events:
        return None
    windows = thin_out(make_windows(run), len(events))
    shown = [event for event in events if _is_in(event, windows)]
    marks = [event for event in run.events if event.about.mark == "worker"]
    rows, places = _rows(shown, marks)
    return {
        "rows": [{name: row[name] for name in ("name", "middle", "height")} for row in rows],
        "tracks": _tracks(shown, places),
        "marks": [_mark(event, rows) for event in marks],
        "windows": [{"label": window.label, "start": window.start, "end": window.end} for window in windows],
        "selected": _representative(windows),
        "height": round(_MARGIN + _PIXELS * sum(row["height"] for row in rows)),
    }


def make_windows(run: RunData) -> list[Window]:
    """Return a window before the first step, then one for every few steps with what followed them."""
    steps = run.steps
    blocks = [steps[first : first + STEPS_SHOWN] for first in range(0, len(steps), STEPS_SHOWN)]
    if not blocks:
        return [Window("the run so far", 0.0, run.seconds)]
    starts = [block[0].start for block in blocks]
    ends = _last_ends(run.spans, starts)
    windows = [Window(_label(block), start, end) for block, start, end in zip(blocks, starts, ends[1:], strict=True)]
    before = [Window(_BEFORE, 0.0, starts[0])] if ends[0] > 0 else []
    return before + windows


def thin_out(windows: Sequence[Window], spans: int) -> list[Window]:
    """Keep every so-many-th window, so that about MAX_SPANS of `spans` remain."""
    return list(windows[:: math.ceil(spans / MAX_SPANS)])


def _last_ends(events: Iterable[Event], starts: Sequence[float]) -> list[float]:
    """Return the last end of the events that began before the first start, then between each start and the next."""
    ends = [0.0] * (len(starts) + 1)
    for event in events:
        part = bisect_right(starts, event.start)
        ends[part] = max(ends[part], event.end)
    return ends


def _label(block: Sequence[Event]) -> str:
    first, last = shown_step(block[0]), shown_step(block[-1])
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _representative(windows: Sequence[Window]) -> int:
    """Return the index of a window of steps of median length: neither the fastest steps nor an evaluation."""
    lengths = {index: window.end - window.start for index, window in enumerate(windows) if window.label != _BEFORE}
    if not lengths:
        return 0
    median = statistics.median_low(lengths.values())
    return next(index for index, length in lengths.items() if length == median)


def _is_in(event: Event, windows: Iterable[Window]) -> bool:
    return any(event.start < window.end and event.end > window.start for window in windows)


def _rows(events: Sequence[Event], marks: Iterable[Event]) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Return a row for each actor, one for its responses, and one for each worker that is known by its mark alone.

    Also return the middle and the height of the bar of each event.
    """
    members: dict[_Row, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        members[_Row(*row_of(event), event.about.row == "responses")].append(index)
    known = {row.worker for row in members}
    for event in marks:
        if worker_of(event) not in known:
            members[_Row(*row_of(event), False)] = []
    rows: list[dict[str, Any]] = []
    places = [(0.0, 0.0)] * len(events)
    top = 0.0
    for row, indexes in sorted(members.items(), key=lambda item: item[0].order):
        lanes = assign_lanes([events[index] for index in indexes])
        count = max(lanes, default=0) + 1
        unit = row.lane_height(count)
        height = max(_ROW, unit * count)
        middle = round(top + height / 2, 3)
        rows.append({"worker": row.worker, "name": row.name, "middle": middle, "height": round(height, 3)})
        for index, lane in zip(indexes, lanes, strict=True):
            places[index] = (round(top + unit * (lane + 0.5), 4), round(unit * 0.8, 4))
        top += height
    return rows, places


class _Row(NamedTuple):
    worker: str
    actor: str
    is_samples: bool

    @property
    def name(self) -> str:
        name = row_name(self.worker, self.actor)
        return f"{name}: responses" if self.is_samples else name

    def lane_height(self, lanes: int) -> float:
        """Return the height of each lane. Weights of several versions may be in flight, and share one row."""
        if self.is_samples:
            return min(_LANE, _LANES / lanes)
        if not self.worker:
            return _ROW
        return min(_ROW, (_ROW if self.actor == "weights" else _TALLEST) / lanes)

    @property
    def order(self) -> tuple[Any, ...]:
        return *row_order(self.worker, self.actor), self.is_samples


def _mark(event: Event, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the mark of an event of a worker, on the first of the worker's rows."""
    row = next(row for row in rows if row["worker"] == worker_of(event))
    return {"name": title(event.task), "time": round(event.end, 4), "y": row["middle"], "text": mark_text(event)}


def _tracks(events: Sequence[Event], places: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return the spans of each task, with a column for each property."""
    tasks = list(dict.fromkeys(event.task for event in events))
    tracks: dict[str, dict[str, Any]] = {
        task: {"task": task, "name": title(task), "colour": colour}
        | {column: [] for column in ("start", "seconds", "y", "height", "text")}
        for task, colour in zip(tasks, task_colours(tasks), strict=True)
    }
    for event, (middle, height) in zip(events, places, strict=True):
        track = tracks[event.task]
        track["start"].append(round(event.start, 4))
        track["seconds"].append(round(event.end - event.start, 4))
        track["y"].append(middle)
        track["height"].append(height)
        track["text"].append(_hover(event))
    return list(tracks.values())


def _hover(event: Event) -> str:
    step = None if event.step is None else shown_step(event)
    amounts = (("step", step), ("samples", event.samples), ("tokens", event.tokens), ("version", event.version))
    words = [f"{name} {value:,}" for name, value in amounts if value is not None]
    if (last := event.info.get("last_version", event.version)) != event.version:
        words[-1] += f" to {last:,}"
    return " · ".join([duration(event.end - event.start), *words])
