"""The chart of TP decisions."""

from datetime import UTC, datetime

import plotly.graph_objects as go  # type: ignore[import-untyped]

from tailrace.events import Event
from tailrace.report.adaptive_tp import adaptive_tp_figure
from tailrace.report.run_data import RunData


def verdict(at: float, unfinished: int, source: int, target: int, **info: object) -> Event:
    metrics = {"unfinished": float(unfinished), "source_tp": float(source), "target_tp": float(target)}
    metrics |= {"switch_s": 0.05, "predicted_s": 0.04} if source != target else {}
    return Event(task="adaptive_tp", actor="engine", start=at, end=at + 0.1, metrics=metrics, info=dict(info))


def run(events: list[Event]) -> RunData:
    return RunData(name="run", events=events, last_event_at=datetime.now(UTC))


def test_a_run_without_decisions_has_no_chart() -> None:
    assert adaptive_tp_figure(run([])) is None


def test_each_decision_is_a_mark_and_tp_changes_only_where_a_switch_was_made() -> None:
    figure = adaptive_tp_figure(
        run(
            [
                verdict(0, 64, 1, 1, decision={"reason": "saves nothing"}),
                verdict(1, 9, 1, 2, decision={"reason": "no room"}, failure="TP stays 1"),
                verdict(2, 8, 1, 2, decision={"reason": "TP 2 in 3 s"}),
                verdict(3, 0, 2, 1),
            ]
        )
    )
    assert figure is not None
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


def test_each_engine_has_lines_of_its_own() -> None:
    events = [verdict(at, 8 - at, 1 + at % 2, 2 - at % 2, decision={"reason": "x"}) for at in range(4)]
    for at, event in enumerate(events):
        event.worker = f"rollout-{at // 2}"
    figure = adaptive_tp_figure(run(events[::2] + events[1::2]))
    assert figure is not None
    traces = {trace["name"]: trace for trace in figure.data}
    assert traces["rollout-0: unfinished responses"]["y"] == [8, 7]
    assert traces["rollout-1: unfinished responses"]["y"] == [6, 5]
    assert traces["rollout-0: TP"]["y"] == [1, 2, 2, 1]
    assert all(text.startswith("rollout-") for text in traces["switched"]["text"])
