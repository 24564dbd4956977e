"""The data and charts made from the events of workers."""

from datetime import UTC, datetime
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
import pytest

from tailrace.events import Event
from tailrace.report.charts import thinned
from tailrace.report.figures import staleness_figure, staleness_of_steps_figure
from tailrace.report.page import render
from tailrace.report.run_data import RunData
from tailrace.report.worker_figures import utilization_figure, weights_figure, worker_sections
from tailrace.report.workers import row_name, summaries, weight_flights, worker_order
from tests.report.synthetic import resumed_run
from tests.report.synthetic_workers import separated_run


def run_of(events: list[Event]) -> RunData:
    return RunData(name="run", events=events, last_event_at=datetime(2026, 1, 1, tzinfo=UTC))


def activity(start: float, worker: str = "rollout-0", **seconds: float) -> Event:
    end = start + sum(seconds.values())
    return Event(task="activity", actor="rollout", start=start, end=end, metrics=seconds, worker=worker)


def moment(task: str, at: float, worker: str = "rollout-0") -> Event:
    return Event(task=task, actor=worker, start=at, end=at)


def publish(version: int, at: float) -> Event:
    return Event(task="weights_publish", actor="trainer", start=at, end=at + 1, version=version, worker="trainer")


def install(version: int, at: float, worker: str = "rollout-0") -> Event:
    return Event(task="update_weights", actor="engine", start=at, end=at + 1, version=version, worker=worker)


def step(number: int, end: float, **metrics: float) -> Event:
    return Event(task="step", actor="driver", start=end - 1, end=end, step=number, metrics=metrics)


def test_workers_are_ordered_by_their_work_and_their_number() -> None:
    names = ["trainer", "rollout-10", "other-0", "reward-0", "", "rollout.wide-0", "rollout-2", "reference-0"]
    assert sorted(names, key=worker_order) == [
        "", "rollout-2", "rollout-10", "rollout.wide-0", "reward-0", "reference-0", "trainer", "other-0",
    ]  # fmt: skip


def test_an_actor_is_named_by_its_worker_unless_it_is_the_worker() -> None:
    assert row_name("", "engine") == "engine"
    assert row_name("rollout-0", "rollout") == "rollout-0"
    assert row_name("rollout.wide-0", "rollout") == "rollout.wide-0"
    assert row_name("rollout-0", "engine") == "rollout-0 · engine"


def test_the_time_of_workers_counts_after_the_first_step() -> None:
    warm_up, after = activity(0, weights=10.0), activity(10, busy=6.0, data=2.0)
    (worker,) = summaries(run_of([warm_up, step(0, 9.5), after, activity(18, busy=2.0)]))
    assert worker.seconds == {"busy": 8.0, "weights": 0.0, "data": 2.0, "idle": 0.0}
    assert (worker.total, worker.share("busy"), worker.share("data")) == (10.0, 0.8, 0.2)


def test_a_run_without_a_step_shows_what_there_is() -> None:
    (worker,) = summaries(run_of([activity(0, weights=3.0, idle=1.0)]))
    assert worker.share("weights") == 0.75


def test_a_worker_that_observed_no_time_has_no_shares() -> None:
    (worker,) = summaries(run_of([activity(0)]))
    assert worker.share("busy") == 0.0


def test_weights_are_on_their_way_from_publication_until_installed() -> None:
    flights = weight_flights([publish(1, 10), install(1, 12), install(1, 13, "rollout-1"), install(2, 20)])
    assert [(flight.worker, flight.version, flight.start, flight.end) for flight in flights] == [
        ("rollout-0", 1, 10, 13),
        ("rollout-1", 1, 10, 14),
    ]


def test_for_a_worker_that_came_later_the_way_of_weights_begins_with_it() -> None:
    flights = weight_flights([publish(1, 10), moment("worker_started", 50), install(1, 51)])
    assert [(flight.start, flight.end) for flight in flights] == [(50, 52)]


def test_an_engine_in_the_process_of_the_run_has_no_weights_in_flight() -> None:
    assert weight_flights([publish(1, 10), install(1, 12, "")]) == []
    assert weights_figure(run_of(resumed_run())) is None


def test_the_bar_of_a_worker_is_its_whole_time() -> None:
    figure = utilization_figure(summaries(run_of(separated_run())))
    assert figure is not None
    assert [trace["name"] for trace in figure.data] == ["busy", "waiting for data", "waiting for weights", "idle"]
    for shares in zip(*(trace["x"] for trace in figure.data), strict=True):
        assert sum(shares) == pytest.approx(1)


def test_the_way_of_weights_is_that_of_the_median_and_of_the_last_worker() -> None:
    events = [publish(1, 10), *(install(1, 10 + late, f"rollout-{late}") for late in (1, 2, 6))]
    figure = weights_figure(run_of(events))
    assert figure is not None
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in figure.data} == {
        "median worker": ([1], [3]),
        "last worker": ([1], [7]),
    }


def test_staleness_is_counted_over_all_steps() -> None:
    steps = [step(0, 1, **{"staleness/0": 6.0, "staleness/2": 2.0}), step(1, 2, **{"staleness/0": 2.0})]
    figure = staleness_figure(steps)
    assert figure is not None
    (bars,) = figure.data
    assert (bars["x"], bars["y"], bars["text"]) == ([0, 1, 2], [0.8, 0.0, 0.2], ["8", "0", "2"])


def test_a_run_whose_samples_are_all_fresh_has_no_charts_of_staleness() -> None:
    steps = [step(0, 1, staleness_mean=0.0, staleness_max=0.0, **{"staleness/0": 8.0})]
    assert staleness_figure(steps) is None
    assert staleness_of_steps_figure(steps) is None


def test_the_queue_is_drawn_over_time_task_by_task() -> None:
    (_, queue) = worker_sections(run_of(separated_run()))
    ready, leased, size = queue.figures
    assert [trace["name"] for trace in ready.data] == [trace["name"] for trace in leased.data]
    assert [trace["name"] for trace in ready.data] == ["rollout", "reward", "actor"]
    depths = [event.metrics["ready/actor"] for event in separated_run() if event.task == "queue"]
    assert ready.data[2]["y"] == depths
    assert [trace["name"] for trace in size.data] == ["rows", "MiB"]


def test_a_long_line_is_thinned_to_means() -> None:
    assert thinned([1.0, 2.0]) == [1.0, 2.0]
    long = thinned([float(value) for value in range(6000)])
    assert len(long) == 600
    assert long[:2] == [4.5, 14.5]


def test_every_figure_of_the_workers_is_valid_plotly() -> None:
    for section in worker_sections(run_of(separated_run())):
        for figure in section.figures:
            go.Figure(data=figure.data, layout=figure.layout)
            assert figure.layout["xaxis"]["title"]["text"]
            assert figure.layout["yaxis"]["title"]["text"]


def test_the_table_has_a_row_for_each_worker_and_counts_its_deaths() -> None:
    (workers, _) = worker_sections(run_of(separated_run()))
    rows: dict[str, Any] = {row["Worker"]: row for row in workers.table}
    assert list(rows) == ["rollout-0", "rollout-1", "reward-0", "trainer"]
    assert [row["Deaths"] for row in rows.values()] == ["0", "1", "0", "0"]
    assert (rows["rollout-0"]["Weights installed"], rows["trainer"]["Weights installed"]) == ("12", "–")


def test_deaths_and_staleness_are_among_the_headline_figures() -> None:
    page = render(run_of([*separated_run(), moment("worker_died", 90), moment("worker_died", 91, "rollout-1")]))
    assert "rollout-1 × 2, rollout-0; 1 restarted" in page
    assert "2 versions at most" in page


def test_rows_that_went_back_are_a_headline_figure_where_there_were_any() -> None:
    def queue(at: float, **expired: float) -> Event:
        metrics = {f"expired/{task}": rows for task, rows in expired.items()}
        return Event(task="queue", actor="driver", start=at, end=at, metrics=metrics)

    assert "rollout 8, reward 1; from dead or slow workers" in render(
        run_of([queue(1, rollout=4), queue(2, rollout=8, reward=1, actor=0)])
    )
    assert "Rows that went back" not in render(run_of([queue(1, rollout=0)]))


def test_a_colocated_run_shows_nothing_of_workers() -> None:
    run = run_of(resumed_run())
    assert worker_sections(run) == []
    page = render(run)
    assert "<h2>Workers</h2>" not in page
    assert "Deaths of workers" not in page


def test_hours_of_reports_leave_the_page_small() -> None:
    events = separated_run()
    for second in range(110, 20_000):
        events.append(activity(float(second), busy=1.0))
        queue = {"ready/actor": float(second % 50), "rows": 50.0, "bytes": 1e6}
        events.append(Event(task="queue", actor="driver", start=float(second), end=float(second), metrics=queue))
    assert len(render(run_of(events))) < len(render(run_of(separated_run()))) + 200_000
