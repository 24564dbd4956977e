"""The chart of TP decisions."""

from datetime import UTC, datetime

import plotly.graph_objects as go  # type: ignore[import-untyped]

from tailrace.events import Event
from tailrace.report.adaptive_tp import adaptive_tp_figures
from tailrace.report.run_data import RunData


def verdict(at: float, unfinished: int, source: int, target: int, **info: object) -> Event:
    metrics = {"unfinished": float(unfinished), "source_tp": float(source), "target_tp": float(target)}
    metrics |= {"switch_s": 0.05, "predicted_s": 0.04} if source != target else {}
    return Event(task="adaptive_tp", actor="engine", start=at, end=at + 0.1, metrics=metrics, info=dict(info))


def run(events: list[Event]) -> RunData:
    return RunData(name="run", events=events, last_event_at=datetime.now(UTC))


def test_a_run_without_decisions_has_no_chart() -> None:
    assert adaptive_tp_figures(run([])) == []


def test_each_decision_is_a_mark_and_tp_changes_only_where_a_switch_was_made() -> None:
    (figure,) = adaptive_tp_figures(
        run(
            [
                verdict(0, 64, 1, 1, decision={"reason": "saves nothing"}),
                verdict(1, 9, 1, 2, decision={"reason": "no room"}, failure="TP stays 1"),
                verdict(2, 8, 1, 2, decision={"reason": "TP 2 in 3 s"}),
                verdict(3, 0, 2, 1),
            ]
        )
    )
    go.Figure(data=figure.data, layout=figure.layout)
    traces = {trace["name"]: trace for trace in figure.data}
    assert {name: trace["y"] for name, trace in traces.items() if trace["mode"] == "markers"} == {
        "kept": [64],
        "given up": [9],
        "switched": [8, 0],
    }
    assert traces["switched"]["text"] == [
        "TP 1 to 2 in 0.05 s (predicted 0.04 s): TP 2 in 3 s",
        "TP 2 to 1 in 0.05 s (predicted 0.04 s): the batch is done",
    ]
    assert traces["given up"]["text"] == ["TP stays 1"]
    assert traces["TP"]["y"] == [1, 1, 1, 1, 1, 2, 2, 1]


def test_each_engine_has_a_chart_of_its_own() -> None:
    events = [verdict(at, 8 - at, 1 + at % 2, 2 - at % 2, decision={"reason": "x"}) for at in range(4)]
    for at, event in enumerate(events):
        event.worker = f"rollout-{at // 2}"
    figures = adaptive_tp_figures(run(events[::2] + events[1::2]))
    assert [figure.title for figure in figures] == [f"Adaptive tensor parallelism of rollout-{k}" for k in (0, 1)]
    traces = [{trace["name"]: trace for trace in figure.data} for figure in figures]
    assert [of["unfinished responses"]["y"] for of in traces] == [[8, 7], [6, 5]]
    assert [of["TP"]["y"] for of in traces] == [[1, 2, 2, 1], [1, 2, 2, 1]]
    assert [len(of["switched"]["x"]) for of in traces] == [2, 2]
