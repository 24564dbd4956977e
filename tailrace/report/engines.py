"""The chart and the table of a run's number of engines, beside the times of generation and training."""

from collections.abc import Iterator, Sequence
from typing import Any

from tailrace.errors import counted
from tailrace.events import Event
from tailrace.registers.events import BLUE, GREEN, GREY, ORANGE, RED, EventKind
from tailrace.report.charts import Figure, Section, axis, right_axis, thinned
from tailrace.report.run_data import RunData, shown_step
from tailrace.report.step_times import StepTime, step_times
from tailrace.report.text import duration, number, value_at

_SHOWN = 40
"""Maximum number of changes in the table, the newest ones."""
_OUTCOMES = {1: ("more engines", GREEN, "triangle-up"), -1: ("fewer engines", ORANGE, "triangle-down")}
_OUTCOMES |= {0: ("not as many as asked for", RED, "x")}
"""The outcomes of changes, with the colour and the symbol of their marks. One that changed nothing, and had nothing to
change, has none."""
_TERMS = {
    "generation_s": "Generation",
    "training_s": "Training",
    "lead_s": "δ",
    "saved_s": "δ'",
    "lost_s": "Lost with one less",
}
"""The terms of a decision, with their titles."""


def engine_sections(run: RunData) -> list[Section]:
    """Return the chart and the table of the number of engines; none where it was never changed."""
    changes = list(run.of(EventKind.SCALE))
    if not changes:
        return []
    more = len(changes) - _SHOWN
    note = f"The table has the newest {_SHOWN} of {counted(len(changes), 'change')}." if more > 0 else ""
    shown = changes[-_SHOWN:]
    terms = [name for name in _TERMS if any(name in change.metrics for change in shown)]
    rows = [_row(change, terms) for change in shown]
    return [Section("Number of engines", [_figure(run, changes)], rows, note)]


def _figure(run: RunData, changes: Sequence[Event]) -> Figure:
    times = step_times(run)
    counts = list(_counts(run))
    most = max(count for _, count in counts)
    data = [
        _time_line(times, "generation of a step", BLUE, [time.generation_s for time in times]),
        _time_line(times, "training on it", GREY, [time.training_s for time in times]),
        {
            "type": "scatter",
            "name": "engines",
            "x": [at for at, _ in counts],
            "y": [count for _, count in counts],
            "mode": "lines",
            "line": {"color": ORANGE, "width": 2.4, "shape": "hv"},
            "yaxis": "y2",
            "hovertemplate": "%{y} engines<extra></extra>",
        },
        *(_marks(changes, outcome) for outcome in _OUTCOMES),
    ]
    return Figure(
        id="engines",
        title="Engines beside generation and training",
        caption=(
            "Seconds in which the samples of each step were generated, and in which it was trained on, at the time "
            "when it ended; the number of engines, and each change of it. δ is generation less training, δ' what one "
            "more engine is predicted to save."
        ),
        data=[trace for trace in data if trace["x"]],
        layout={
            "xaxis": axis("Time since the start (s)"),
            "yaxis": axis("Time of a step (s)", rangemode="tozero"),
            "yaxis2": right_axis("Engines", range=[0, 1.25 * most], tickformat="d", dtick=max(1, -(-most // 8))),
        },
        wide=True,
    )


def _time_line(times: Sequence[StepTime], name: str, colour: str, seconds: Sequence[float]) -> dict[str, Any]:
    x, y = thinned([time.step.end for time in times]), thinned(seconds)
    is_each = len(x) == len(times)
    return {
        "type": "scatter",
        "name": name,
        "x": x,
        "y": y,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 1.6},
        "marker": {"color": colour, "size": 4},
        "text": [f"step {shown_step(time.step)}: " for time in times] if is_each else [""] * len(x),
        "hovertemplate": "%{text}%{y:.3~g} s<extra>" + name + "</extra>",
    }


def _counts(run: RunData) -> Iterator[tuple[float, int]]:
    """Yield times, and the number of engines from then on. An attempt at the run begins with that of its recipe."""
    count = 0
    for event in run.of(EventKind.RUN, EventKind.SCALE):
        if event.task == EventKind.SCALE:
            if not count:
                yield 0.0, int(event.metrics["engines"])
            count = _after(event)
            yield event.end, count
        elif workers := _workers(event.info.get("config")):
            count = workers
            yield event.end, count
    yield run.seconds, count


def _workers(config: Any) -> int:
    """The rollout workers of all pools of a recorded configuration; 0 where it tells of none."""
    rollout = value_at(config, "cluster.rollout")
    pools = [rollout, *(value_at(rollout, "pools") or {}).values()]
    return sum(value_at(pool, "workers") or 0 for pool in pools)


def _after(change: Event) -> int:
    return len(change.info["engines"])


def _marks(changes: Sequence[Event], outcome: int) -> dict[str, Any]:
    name, colour, symbol = _OUTCOMES[outcome]
    shown = [change for change in changes if _outcome(change) == outcome]
    return {
        "type": "scatter",
        "name": name,
        "x": [change.end for change in shown],
        "y": [_after(change) for change in shown],
        "mode": "markers",
        "marker": {"color": colour, "size": 11, "symbol": symbol},
        "yaxis": "y2",
        "text": [_words(change) for change in shown],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _outcome(change: Event) -> int | None:
    difference = _after(change) - change.metrics["engines"]
    if _after(change) != change.metrics["wanted"]:
        return 0
    return (difference > 0) - (difference < 0) or None


def _words(change: Event) -> str:
    """Describe a change, with the terms of its decision."""
    terms = [f"{title} {number(change.metrics[name])} s" for name, title in _TERMS.items() if name in change.metrics]
    return "<br>".join([str(change.info["text"]), *terms])


def _row(change: Event, terms: Sequence[str]) -> dict[str, str]:
    """Return the row of a change. One that was made by hand has no terms."""
    metrics = change.metrics
    values = {_TERMS[name]: f"{number(metrics[name])} s" if name in metrics else "–" for name in terms}
    return {"Change": str(change.info["text"]), "At": duration(change.end), **values}
