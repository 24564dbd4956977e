"""The charts of a run as plotly figures in plain dictionaries. The page sets the colours of text and grid."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tailrace.events import Event
from tailrace.registers.events import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, EventKind, about, title
from tailrace.registers.metrics import STALENESS, TIME, charted_in, has_chart, metric
from tailrace.report.charts import Figure, Section, axis, sections
from tailrace.report.run_data import RunData, metric_names, metric_series, shown_step, step_of

_STEP = "Training step"


def progress_sections(run: RunData) -> list[Section]:
    """Return the charts that show whether training works, and how fast. Charts and sections without data are left
    out."""
    steps = run.steps
    return sections(
        {
            "Learning": [reward_figure(run), accuracy_figure(run)],
            "Responses": [lengths_figure(run), early_late_figure(run)],
            "Speed": [*_series_figures(steps, charted_in("Speed")), task_time_figure(steps)],
            "Staleness": [staleness_figure(steps), staleness_of_steps_figure(steps)],
        }
    )


def detail_sections(run: RunData) -> list[Section]:
    """Return the charts to look into when something is odd, including every metric without another chart."""
    steps = run.steps
    return sections(
        {
            "Optimization": _series_figures(steps, charted_in("Optimization")),
            "Reward failures": [failures_figure(run)],
            "Further metrics": _series_figures(steps, _other_metrics(steps)),
        }
    )


def series_figure(events: Sequence[Event], name: str) -> Figure | None:
    """Draw a metric of each step, and its moving mean."""
    steps, values = metric_series(events, name)
    if not steps:
        return None
    shown = metric(name)
    layout = _layout(_STEP, shown.full_title, percent=shown.is_fraction) | {"showlegend": False}
    if shown.is_scheduled:
        caption, data = "As its schedule sets it.", [_line(steps, values, shown.words, BLUE, width=2.4)]
        layout["yaxis"]["range"] = [0, 1.1 * max(values)]  # else a constant 1e-6 is drawn as 0, on an axis from -1 to 1
    else:
        caption = f"Each training step, and the mean of the last {_window(values)}."
        data = _series(steps, values, shown.words, percent=shown.is_fraction)
    return Figure(id=f"metric-{name.replace('/', '-')}", title=shown.words, caption=caption, data=data, layout=layout)


def reward_figure(run: RunData) -> Figure | None:
    """Draw the reward of the training samples of each step, and of the held-out prompts."""
    caption = "Mean over the graded samples of each step, and over the answers to held-out prompts."
    return _learning_figure(run, "reward", id="metric-reward", caption=caption)


def accuracy_figure(run: RunData) -> Figure | None:
    """Draw the accuracy on the training samples of each step and on the held-out prompts, where the grader says it."""
    caption = "Right answers among the samples of each step, and to held-out prompts."
    return _learning_figure(run, "accuracy", id="accuracy", caption=caption)


def _learning_figure(run: RunData, name: str, *, id: str, caption: str) -> Figure | None:
    steps, values = metric_series(run.steps, name)
    evaluated, held_out = metric_series(run.evaluations, name)
    if not steps and not evaluated:
        return None
    shown = metric(name)
    data = _series(steps, values, "training", percent=shown.is_fraction)
    write = ".1%" if shown.is_fraction else ".4~g"
    if evaluated:
        data.append(
            {
                "type": "scatter",
                "name": "held-out",
                "x": evaluated,
                "y": held_out,
                "mode": "lines+markers",
                "line": {"color": ORANGE, "width": 1.5, "dash": "dot"},
                "marker": {"color": ORANGE, "size": 10 if len(evaluated) <= 20 else 5, "symbol": "diamond"},
                "hovertemplate": "after %{x} steps: %{y:" + write + "}<extra>held-out</extra>",
            }
        )
    layout = _layout(_STEP, shown.full_title, percent=shown.is_fraction)
    return Figure(id=id, title=shown.words, caption=caption, data=data, layout=layout)


def lengths_figure(run: RunData) -> Figure | None:
    """Draw percentile bands of the response lengths of each step."""
    by_step = _lengths_by_step(run)
    if not by_step:
        return None
    steps = sorted(by_step)
    low, median, high = np.array([np.percentile(by_step[step], (10, 50, 90)) for step in steps]).T.tolist()
    longest = [max(by_step[step]) for step in steps]
    data = [
        _line(steps, low, "10th percentile", BLUE, width=0.8, legend=False),
        _line(steps, high, "10th to 90th percentile", BLUE, width=0.8)
        | {"fill": "tonexty", "fillcolor": "rgba(66,133,201,0.22)", "hovertemplate": "%{y:.0f}<extra>90th</extra>"},
        _line(steps, median, "median", BLUE, width=2.4),
        _line(steps, longest, "longest", ORANGE, width=1.2, dash="dot"),
    ]
    return Figure(
        id="lengths",
        title="Response length",
        caption="Tokens of the responses of each step: median, the middle 80 %, and the longest.",
        data=data,
        layout=_layout(_STEP, "Response length (tokens)", from_zero=True),
    )


def early_late_figure(run: RunData) -> Figure | None:
    """Draw histograms of the response lengths in the first and in the last fifth of the steps."""
    by_step = _lengths_by_step(run)
    if len(by_step) < 2:
        return None
    steps = sorted(by_step)
    count = max(1, len(steps) // 5)
    early, late = ([length for step in part for length in by_step[step]] for part in (steps[:count], steps[-count:]))
    edges = np.histogram_bin_edges([*early, *late], bins=30)
    parts = ((early, steps[:count], GREY), (late, steps[-count:], BLUE))
    return Figure(
        id="lengths-early-late",
        title="Response lengths, early and late",
        caption=f"Distribution in the first and in the last {count} of {len(steps)} steps.",
        data=[_histogram(lengths, edges, _span_of(part), colour) for lengths, part, colour in parts],
        layout=_layout("Response length (tokens)", "Responses", percent=True) | {"barmode": "overlay", "bargap": 0.03},
    )


def staleness_figure(events: Sequence[Event]) -> Figure | None:
    """Draw the number of samples that were trained on at each staleness; None where none was stale."""
    counts: Counter[int] = Counter()
    for event in events:
        for name, count in event.metrics.items():
            if name.startswith(STALENESS.prefix):
                counts[int(name.removeprefix(STALENESS.prefix))] += int(count)
    if not any(counts[staleness] for staleness in counts if staleness):
        return None
    total = counts.total()
    x = list(range(max(counts) + 1))
    bars = {
        "type": "bar",
        "x": x,
        "y": [counts[staleness] / total for staleness in x],
        "text": [f"{counts[staleness]:,}" for staleness in x],
        "textposition": "none",
        "marker": {"color": BLUE},
        "hovertemplate": "%{x} versions: %{text} samples, %{y:.1%}<extra></extra>",
    }
    layout = _layout("Staleness (versions)", "Samples", percent=True) | {"showlegend": False, "bargap": 0.15}
    layout["xaxis"] |= {"tickformat": "d", "dtick": math.ceil(len(x) / 20)}
    return Figure(
        id="staleness",
        title="Staleness",
        caption="Updates between the oldest weights that made a response and those that trained on it.",
        data=[bars],
        layout=layout,
    )


def staleness_of_steps_figure(events: Sequence[Event]) -> Figure | None:
    """Draw the mean and greatest staleness of each step; None where no sample was stale."""
    steps, means = metric_series(events, "staleness_mean")
    greatest_steps, greatest = metric_series(events, "staleness_max")
    if not any(greatest):
        return None
    data = [
        _line(steps, means, "mean", BLUE, width=2.4),
        _line(greatest_steps, greatest, "greatest", ORANGE, width=1.2, dash="dot"),
    ]
    return Figure(
        id="staleness-of-steps",
        title="Staleness of each step",
        caption="Mean and greatest of the samples that a step trained on.",
        data=[trace for trace in data if trace["x"]],
        layout=_layout(_STEP, "Staleness (versions)", from_zero=True),
    )


def task_time_figure(events: Sequence[Event]) -> Figure | None:
    """Draw the seconds that each task took in each step, stacked."""
    names = [name for name in metric_names(events) if name.startswith(TIME.prefix)]
    if not names:
        return None
    data = []
    for name, colour in zip(names, task_colours([name.removeprefix(TIME.prefix) for name in names]), strict=True):
        steps, seconds = metric_series(events, name)
        task = title(name.removeprefix(TIME.prefix))
        hover = "step %{x}: %{y:.2f} s"
        data.append(
            {"type": "bar", "name": task, "x": steps, "y": seconds, "marker": {"color": colour}, "hovertemplate": hover}
        )
    return Figure(
        id="task-time",
        title="Time of each step by task",
        caption="Seconds that each task took. Tasks that overlap add up to more than the step.",
        data=data,
        layout=_layout(_STEP, "Time (s)") | {"barmode": "stack", "bargap": 0},
        wide=True,
    )


def failures_figure(run: RunData) -> Figure | None:
    """Draw failed gradings by kind; None where none failed."""
    kinds: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for event in run.of(EventKind.REWARD):
        for kind, count in (event.info.get("failures") or {}).items():
            kinds[kind][0 if event.step is None else shown_step(event)] += count
    if not kinds:
        return None
    data = [
        {
            "type": "bar",
            "name": kind,
            "x": list(counts),
            "y": list(counts.values()),
            "marker": {"color": colour},
            "width": 1,
        }
        for (kind, counts), colour in zip(kinds.items(), task_colours(kinds), strict=True)
    ]
    layout = _layout(_STEP, "Failed gradings", from_zero=True) | {"barmode": "stack", "showlegend": True}
    layout["xaxis"]["range"] = [0.5, run.total_steps + 0.5]
    layout["yaxis"]["tickformat"] = "~d"
    caption = "Samples whose grading failed, by kind of failure."
    return Figure(id="failures", title="Reward failures", caption=caption, data=data, layout=layout)


def step_axis() -> dict[str, Any]:
    """Return the axis of training steps."""
    return axis(_STEP, autorangeoptions={"include": [0, 5]})  # a lone step would be shown from -1 to 1


def task_colours(tasks: Iterable[str]) -> list[str]:
    """Return a colour for each task: its own, or one of those that are left."""
    spare = (RED, PURPLE, ORANGE, GREEN, BLUE, GREY)
    return [about(task).colour or spare[index % len(spare)] for index, task in enumerate(tasks)]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and of the `window` - 1 values before it, or of as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return [float(mean) for mean in (sums[ends] - sums[starts]) / (ends - starts)]


def _series_figures(events: Sequence[Event], names: Iterable[str]) -> list[Figure | None]:
    return [series_figure(events, name) for name in names]


def _window(values: Sequence[float]) -> int:
    return min(20, max(5, len(values) // 10))


def _series(steps: Sequence[int], values: Sequence[float], name: str, *, percent: bool) -> list[dict[str, Any]]:
    """Return a point for each value and, where there is more than one, a line for their moving mean."""
    if not values:
        return []
    hover = "step %{x}: %{y:" + (".1%" if percent else ".4~g") + "}<extra>"
    points = {
        "type": "scatter",
        "name": name,
        "x": list(steps),
        "y": list(values),
        "mode": "markers",
        "marker": {"color": BLUE, "size": 5, "opacity": 0.55},
        "hovertemplate": hover + "</extra>",
    }
    if len(values) == 1:
        return [points]
    window = _window(values)
    mean = _line(steps, moving_mean(values, window), f"mean of {window} steps", BLUE, width=2.4)
    return [points, mean | {"hovertemplate": hover + "mean</extra>"}]


def _line(
    x: Sequence[int],
    y: Sequence[float],
    name: str,
    colour: str,
    *,
    width: float,
    dash: str = "solid",
    legend: bool = True,
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "x": list(x),
        "y": list(y),
        "mode": "lines" if len(x) > 1 else "markers",
        "line": {"color": colour, "width": width, "dash": dash},
        "showlegend": legend,
        "hovertemplate": "step %{x}: %{y:.4~g}<extra>" + name + "</extra>",
    }


def _histogram(values: Sequence[int], edges: Any, name: str, colour: str) -> dict[str, Any]:
    counts, _ = np.histogram(values, bins=edges)
    return {
        "type": "bar",
        "name": name,
        "x": ((edges[:-1] + edges[1:]) / 2).tolist(),
        "y": (counts / counts.sum()).tolist(),
        "marker": {"color": colour, "opacity": 0.65},
        "hovertemplate": "about %{x:.0f} tokens: %{y:.1%}<extra>" + name + "</extra>",
    }


def _layout(x: str, y: str, *, percent: bool = False, from_zero: bool = False) -> dict[str, Any]:
    yaxis = axis(y, rangemode="tozero" if from_zero or percent else "normal")
    if percent:
        yaxis["tickformat"] = ".2~%"
    return {"xaxis": step_axis() if x == _STEP else axis(x), "yaxis": yaxis}


def _lengths_by_step(run: RunData) -> dict[int, list[int]]:
    """Those of the steps that have ended: of others, the short responses have come first."""
    ended = {step_of(event) for event in run.steps}
    by_step: dict[int, list[int]] = defaultdict(list)
    for event in run.samples:
        if event.tokens is not None and step_of(event) in ended:
            by_step[shown_step(event)].append(event.tokens)
    return by_step


def _span_of(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _other_metrics(events: Sequence[Event]) -> list[str]:
    """Return the metrics that no other chart shows and that are not always 0."""
    return [name for name in metric_names(events) if not has_chart(name) and any(metric_series(events, name)[1])]
