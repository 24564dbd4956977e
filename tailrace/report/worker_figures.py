"""The charts of a run whose tasks have worker processes: the workers' time, their weights and their queue."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.events import Event
from tailrace.registers.events import BLUE, GREY, ORANGE, RED, EventKind
from tailrace.report.breakdown_figures import bar_figure, breakdown_figures
from tailrace.report.charts import Figure, Section, axis, drawn, right_axis, thinned
from tailrace.report.figures import task_colours
from tailrace.report.run_data import RunData, metric_names
from tailrace.report.text import duration, number, percent
from tailrace.report.workers import STATE_TITLES, WorkerSummary, summaries, weight_flights

_COLOURS = {"busy": BLUE, "data": ORANGE, "weights": RED, "idle": "#b8c1ca"}
_TIME = "Time since the start (s)"


def worker_sections(run: RunData) -> list[Section]:
    """Return the charts and the table of the workers, and the charts of the queue, where the run has recorded them."""
    workers = summaries(run)
    of_time = breakdown_figures(run) or drawn([utilization_figure(workers)])  # older runs have no breakdown
    of_workers = [*of_time, *drawn([weights_figure(run)])]
    of_queue = [
        _depths_figure(run, "ready", "Rows that wait for a task", "Rows that the workers of a task could take."),
        _depths_figure(run, "leased", "Rows in work", "Rows that the workers of a task have in hand."),
        _size_figure(run),
    ]
    sections = [
        Section("Workers", of_workers, [_table_row(worker) for worker in workers]),
        Section("Queue", drawn(of_queue)),
    ]
    return [section for section in sections if section.figures]


def _table_row(worker: WorkerSummary) -> dict[str, str]:
    shares = {title.capitalize(): percent(worker.share(state)) for state, title in STATE_TITLES.items()}
    took = worker.weights_s
    return {
        "Worker": worker.worker,
        **shares,
        "Observed": duration(worker.total),
        "Weights installed": number(worker.versions) if took is not None else "–",
        "Their way (median)": f"{number(took)} s" if took is not None else "–",
        "Deaths": number(worker.deaths),
    }


def utilization_figure(workers: Sequence[WorkerSummary]) -> Figure | None:
    """Draw a bar for each worker, divided by what it did."""
    if not workers:
        return None
    names = [worker.worker for worker in workers]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "x": [worker.share(state) for worker in workers],
            "y": names,
            "customdata": [worker.seconds[state] for worker in workers],
            "marker": {"color": _COLOURS[state]},
            "hovertemplate": f"%{{y}}: {title} %{{x:.1%}} (%{{customdata:.1f}} s)<extra></extra>",
        }
        for state, title in STATE_TITLES.items()
    ]
    caption = "Of each worker, after the first step. Waiting is for rows of the queue or for tools, or for new weights."
    return bar_figure("workers", "Where the time goes", caption, data, wide=True)


def weights_figure(run: RunData) -> Figure | None:
    """Draw the seconds that each version took from its publication to the workers."""
    by_version: dict[int, list[float]] = defaultdict(list)
    for event in weight_flights(run.events):
        by_version[event.version or 0].append(event.end - event.start)
    if not by_version:
        return None
    versions = sorted(by_version)
    shown: tuple[tuple[str, Callable[[Sequence[float]], float], dict[str, Any]], ...] = (
        ("median worker", statistics.median, {"color": BLUE, "width": 2.4}),
        ("last worker", max, {"color": ORANGE, "width": 1.2, "dash": "dot"}),
    )
    data = [
        {
            "type": "scatter",
            "name": name,
            "x": versions,
            "y": [of(by_version[version]) for version in versions],
            "mode": "lines" if len(versions) > 1 else "markers",
            "line": line,
            "hovertemplate": "version %{x}: %{y:.3~g} s<extra>" + name + "</extra>",
        }
        for name, of, line in shown
    ]
    return Figure(
        id="weights",
        title="The way of new weights",
        caption="From the publication of a version until a worker had installed it.",
        data=data,
        layout={"xaxis": axis("Weight version"), "yaxis": axis("Time (s)", rangemode="tozero")},
        wide=True,
    )


def _depths_figure(run: RunData, state: str, title: str, caption: str) -> Figure | None:
    events = list(run.of(EventKind.QUEUE))
    names = [name for name in metric_names(events) if name.startswith(f"{state}/")]
    tasks = [name.removeprefix(f"{state}/") for name in names]
    data = [
        _line(events, name, task, {"color": colour, "width": 1.6})
        for name, task, colour in zip(names, tasks, task_colours(tasks), strict=True)
    ]
    return _queue_figure(f"queue-{state}", title, caption, data)


def _size_figure(run: RunData) -> Figure | None:
    events = list(run.of(EventKind.QUEUE))
    if not events:
        return None
    data = [_line(events, "rows", "rows", {"color": BLUE, "width": 1.6})]
    if any(event.metrics.get("bytes") for event in events):
        size = _line(events, "bytes", "MiB", {"color": GREY, "width": 1.2, "dash": "dot"})
        data.append(size | {"y": [value / 2**20 for value in size["y"]], "yaxis": "y2"})
    figure = _queue_figure(
        "queue-size", "Size of the queue", "Rows that are stored, and the bytes of their cells.", data
    )
    if figure is not None:
        figure.layout["yaxis2"] = right_axis("MiB", rangemode="tozero", tickmode="auto")
    return figure


def _queue_figure(name: str, title: str, caption: str, data: list[dict[str, Any]]) -> Figure | None:
    if not data:
        return None
    layout = {"xaxis": axis(_TIME), "yaxis": axis("Rows", rangemode="tozero")}
    return Figure(id=name, title=title, caption=caption, data=data, layout=layout | {"showlegend": True})


def _line(events: Sequence[Event], metric: str, name: str, line: dict[str, Any]) -> dict[str, Any]:
    points = [(event.end, event.metrics[metric]) for event in events if metric in event.metrics]
    x, y = thinned([at for at, _ in points]), thinned([value for _, value in points])
    hover = "%{x:.0f} s: %{y:.3~g}<extra>" + name + "</extra>"
    return {"type": "scatter", "name": name, "x": x, "y": y, "mode": "lines", "line": line, "hovertemplate": hover}
