"""The charts of adaptive tensor parallelism, one for each engine: unfinished responses, TP, and each decision."""

from collections.abc import Iterator, Sequence
from typing import Any

from tailrace.events import Event
from tailrace.registers.events import BLUE, GREY, ORANGE, RED, EventKind
from tailrace.report.charts import Figure, axis, right_axis
from tailrace.report.run_data import RunData
from tailrace.report.workers import worker_order

_SHOWN = 4000
"""Maximum number of decisions that are shown, the newest ones: with more, a browser gets slow."""
_OUTCOMES = {"kept": (BLUE, "circle"), "switched": (ORANGE, "diamond"), "given up": (RED, "x")}
"""The outcomes of decisions, with the colour and the symbol of their marks."""


def adaptive_tp_figures(run: RunData) -> list[Figure]:
    """Draw unfinished responses and TP over the time of the run, for each engine that decided about TP."""
    events = list(run.of(EventKind.ADAPTIVE_TP))[-_SHOWN:]
    engines = sorted({event.worker for event in events}, key=worker_order)
    return [_figure(engine, [event for event in events if event.worker == engine]) for engine in engines]


def _figure(engine: str, events: Sequence[Event]) -> Figure:
    degrees = sorted({int(event.metrics[name]) for event in events for name in ("source_tp", "target_tp")})
    return Figure(
        id=f"adaptive-tp-{engine}" if engine else "adaptive-tp",
        title=f"Adaptive tensor parallelism of {engine}" if engine else "Adaptive tensor parallelism",
        caption="Unfinished responses at each decision, what was decided and why, and the TP degree.",
        data=[trace for trace in (*_lines(events), *_marks_of_decisions(events)) if trace["x"]],
        layout={
            "xaxis": axis("Time since the start (s)"),
            "yaxis": axis("Unfinished responses", rangemode="tozero"),
            "yaxis2": right_axis("TP", tickvals=degrees, range=[0, 1.25 * degrees[-1]]),
        },
        wide=True,
    )


def _marks_of_decisions(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for outcome, (colour, symbol) in _OUTCOMES.items():
        yield _marks(outcome, [event for event in events if _outcome(event) == outcome], colour, symbol)


def _outcome(event: Event) -> str | None:
    """Return the outcome of a decision; None where nothing was decided, since the batch was done."""
    if "failure" in event.info:
        return "given up"
    if _changes(event):
        return "switched"
    return "kept" if "decision" in event.info else None


def _lines(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the lines of one engine: its unfinished responses and its TP."""
    return [
        {
            "type": "scatter",
            "name": "unfinished responses",
            "x": [event.start for event in events],
            "y": [event.metrics["unfinished"] for event in events],
            "mode": "lines",
            "line": {"color": GREY, "width": 1.5, "shape": "hv"},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "name": "TP",
            "x": [time for event in events for time in (event.start, event.end)],
            "y": [event.metrics[name] for event in events for name in ("source_tp", _after(event))],
            "mode": "lines",
            "line": {"color": ORANGE, "width": 2.4, "shape": "hv"},
            "yaxis": "y2",
            "hovertemplate": "TP %{y}<extra></extra>",
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
        "text": list(map(_words, events)),
        "hovertemplate": "%{y} unfinished<br>%{text}<extra></extra>",
    }


def _words(event: Event) -> str:
    """Describe a decision and its reason."""
    metrics, info = event.metrics, event.info
    if failure := info.get("failure"):
        return str(failure)
    why = info["decision"]["reason"] if "decision" in info else "the batch is done"
    if not _changes(event):
        return str(why)
    took = f"TP {metrics['source_tp']:.0f} to {metrics['target_tp']:.0f} in {metrics['switch_s']:.3g} s"
    foreseen = f" (predicted {metrics['predicted_s']:.3g} s)" if "predicted_s" in metrics else ""
    return f"{took}{foreseen}: {why}"
