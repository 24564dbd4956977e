"""The chart of adaptive tensor parallelism: what was unfinished, the TP degree, and each decision."""

from collections.abc import Sequence
from typing import Any

from tailrace.events import Event
from tailrace.registers.events import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, EventKind
from tailrace.report.figures import Figure
from tailrace.report.run_data import RunData
from tailrace.report.workers import worker_order

_SHOWN = 4000
"""Decisions, the newest: beyond that a browser gets slow."""
_ENGINE_COLOURS = (ORANGE, GREEN, PURPLE, BLUE)
"""Of the TP of each engine."""


def adaptive_tp_figure(run: RunData) -> Figure | None:
    """Unfinished responses and TP over the time of the run; nothing where no engine decided about TP."""
    events = list(run.of(EventKind.ADAPTIVE_TP))[-_SHOWN:]
    if not events:
        return None
    kept = [event for event in events if not _changes(event) and "decision" in event.info]
    switched = [event for event in events if _changes(event) and "failure" not in event.info]
    failed = [event for event in events if "failure" in event.info]
    engines = sorted({event.worker for event in events}, key=worker_order)
    lines = [
        line
        for place, engine in enumerate(engines)
        for line in _lines(
            [event for event in events if event.worker == engine],
            f"{engine}: " if len(engines) > 1 else "",
            _ENGINE_COLOURS[place % len(_ENGINE_COLOURS)],
        )
    ]
    marks = [
        _marks("kept", kept, BLUE, "circle"),
        _marks("switched", switched, ORANGE, "diamond"),
        _marks("given up", failed, RED, "x"),
    ]
    data = [*lines, *marks]
    degrees = sorted({int(event.metrics[name]) for event in events for name in ("source_tp", "target_tp")})
    return Figure(
        id="adaptive-tp",
        title="Adaptive tensor parallelism",
        caption="Unfinished responses at each decision, what was decided and why, and the TP degree.",
        data=[trace for trace in data if trace["x"]],
        layout={
            "xaxis": {"title": {"text": "Time since the start (s)"}},
            "yaxis": {"title": {"text": "Unfinished responses"}, "rangemode": "tozero"},
            "yaxis2": {
                "title": {"text": "TP"},
                "overlaying": "y",
                "side": "right",
                "tickvals": degrees,
                "range": [0, 1.25 * degrees[-1]],
                "showgrid": False,
            },
        },
        wide=True,
    )


def _lines(events: Sequence[Event], of: str, colour: str) -> list[dict[str, Any]]:
    """What one engine had to do, and its TP."""
    return [
        {
            "type": "scatter",
            "name": f"{of}unfinished responses",
            "x": [event.start for event in events],
            "y": [event.metrics["unfinished"] for event in events],
            "mode": "lines",
            "line": {"color": GREY, "width": 1.5, "shape": "hv"},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "name": f"{of}TP",
            "x": [time for event in events for time in (event.start, event.end)],
            "y": [event.metrics[name] for event in events for name in ("source_tp", _after(event))],
            "mode": "lines",
            "line": {"color": colour, "width": 2.4, "shape": "hv"},
            "yaxis": "y2",
            "hovertemplate": f"{of}TP %{{y}}<extra></extra>",
        },
    ]


def _changes(event: Event) -> bool:
    return event.metrics["source_tp"] != event.metrics["target_tp"]


def _after(event: Event) -> str:
    return "source_tp" if "failure" in event.info else "target_tp"


def _marks(name: str, events: Sequence[Event], colour: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "x": [event.start for event in events],
        "y": [event.metrics["unfinished"] for event in events],
        "mode": "markers",
        "marker": {"color": colour, "size": 7, "symbol": symbol},
        "text": [f"{event.worker}: {_words(event)}" if event.worker else _words(event) for event in events],
        "hovertemplate": "%{y} unfinished<br>%{text}<extra></extra>",
    }


def _words(event: Event) -> str:
    """What was decided and why."""
    metrics, info = event.metrics, event.info
    if failure := info.get("failure"):
        return str(failure)
    why = info["decision"]["reason"] if "decision" in info else "the batch is done"
    if not _changes(event):
        return str(why)
    took = f"TP {metrics['source_tp']:.0f} to {metrics['target_tp']:.0f} in {metrics['switch_s']:.3g} s"
    foreseen = f" (predicted {metrics['predicted_s']:.3g} s)" if "predicted_s" in metrics else ""
    return f"{took}{foreseen}: {why}"
