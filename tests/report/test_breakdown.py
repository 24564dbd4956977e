"""The time of workers by phase: shares, parts, and steps that end within an event."""

import json
import re
from datetime import UTC, datetime
from itertools import pairwise

import plotly.graph_objects as go  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.events import Event
from tailrace.registers.phases import PARTS, PHASES
from tailrace.report.breakdown import breakdown_by_block, breakdown_of
from tailrace.report.breakdown_figures import breakdown_figures
from tailrace.report.memory import memory_chart
from tailrace.report.page import render
from tailrace.report.run_data import RunData
from tests.report.synthetic_workers import separated_run

GIB = 2.0**30


def told(start: float, worker: str = "rollout-0", **seconds: float) -> Event:
    """An event `breakdown`; a part of generation is given as `generation_decode`."""
    metrics = {name.replace("generation_", "generation/"): value for name, value in seconds.items()}
    end = start + sum(value for name, value in metrics.items() if "/" not in name)
    return Event(task="breakdown", actor="rollout", start=start, end=end, metrics=metrics, worker=worker)


def step(number: int, start: float, end: float) -> Event:
    return Event(task="step", actor="driver", start=start, end=end, step=number)


def memory(at: float, worker: str = "trainer", **gib: float) -> Event:
    metrics = {purpose: value * GIB for purpose, value in gib.items()}
    return Event(task="memory", actor="trainer", start=at, end=at, metrics=metrics, worker=worker)


def run_of(*events: Event) -> RunData:
    return RunData(name="run", events=events, last_event_at=datetime(2026, 1, 1, tzinfo=UTC))


def test_an_event_that_is_partly_in_a_step_counts_in_proportion() -> None:
    events = [told(0, generation=4.0), told(4, data=2.0, generation=2.0)]
    (worker,) = breakdown_of(events, [step(0, 2, 5)])
    assert worker.told == {"generation": 2.5, "data": 0.5}
    assert worker.share("generation") == pytest.approx(2.5 / 3)


def test_each_block_of_steps_has_its_own_part_of_an_event() -> None:
    steps = [step(0, 1, 2), step(1, 2, 4), step(2, 4, 5)]
    blocks = breakdown_by_block([told(0, update=8.0)], [steps[:1], steps[1:]])
    assert [worker.told for block in blocks for worker in block] == [{"update": 1.0}, {"update": 3.0}]


def test_a_worker_that_says_nothing_in_a_step_is_not_in_it() -> None:
    events = [told(0, generation=1.0), told(1, "rollout-1", generation=1.0)]
    assert [worker.worker for worker in breakdown_of(events, [step(0, 0, 1)])] == ["rollout-0"]


def test_parts_leave_the_rest_of_their_phase_to_other() -> None:
    (worker,) = breakdown_of([told(0, generation=4.0, idle=1.0, generation_decode=3.0)], [step(0, 0, 5)])
    assert worker.parts == {"generation": pytest.approx({"decode": 0.6, "other": 0.2})}


def test_parts_of_replicas_beside_each_other_are_scaled_to_the_time_that_passed() -> None:
    replicas = told(0, generation=4.0, generation_decode=6.0, generation_prefill=2.0)
    (worker,) = breakdown_of([replicas], [step(0, 0, 4)])
    assert worker.parts == {"generation": pytest.approx({"prefill": 0.25, "decode": 0.75, "other": 0.0})}


def test_parts_that_nobody_told_are_not_known() -> None:
    (worker,) = breakdown_of([told(0, generation=4.0, update=1.0)], [step(0, 0, 5)])
    assert worker.parts == {}


seconds = st.floats(0, 10, allow_subnormal=False)
events = st.lists(
    st.tuples(
        st.sampled_from(["rollout-0", "trainer"]),
        st.dictionaries(st.sampled_from(list(PHASES)), seconds, min_size=1),
        st.dictionaries(st.sampled_from([f"generation/{part}" for part in PARTS["generation"]]), seconds),
    ),
    min_size=1,
)


@given(events, st.lists(st.floats(0, 30), min_size=2, unique=True))
def test_shares_add_up_to_one_and_parts_to_their_phase(
    told_seconds: list[tuple[str, dict[str, float], dict[str, float]]], cuts: list[float]
) -> None:
    clock, said = {"rollout-0": 0.0, "trainer": 0.0}, []
    for worker, phases, parts in told_seconds:
        start, clock[worker] = clock[worker], clock[worker] + sum(phases.values())
        metrics = phases | parts
        said.append(
            Event(task="breakdown", actor="any", start=start, end=clock[worker], metrics=metrics, worker=worker)
        )
    ends = sorted(cuts)
    steps = [step(number, start, end) for number, (start, end) in enumerate(pairwise(ends))]
    for worker_time in breakdown_of(said, steps):
        if worker_time.seconds > 1e-9:
            assert sum(map(worker_time.share, PHASES)) == pytest.approx(1)
        for phase, shares in worker_time.parts.items():
            assert sum(shares.values()) == pytest.approx(worker_time.share(phase))
            assert min(shares.values()) >= 0


def test_the_charts_show_all_workers_and_the_mean_of_those_of_a_kind() -> None:
    events = [
        told(0, "rollout-0", generation=8.0, data=2.0, generation_decode=6.0),
        told(0, "rollout-1", generation=6.0, data=4.0),
        told(0, "trainer", update=10.0),
    ]
    whole, parts, rollout, trainer = breakdown_figures(run_of(*events, step(0, 0, 10)))
    shares = {trace["name"]: trace["x"] for trace in whole.data}
    assert shares == {"generation": [0.8, 0.6, 0.0], "update": [0.0, 0.0, 1.0], "waiting for data": [0.2, 0.4, 0.0]}
    assert {trace["name"]: (trace["y"], trace["x"]) for trace in parts.data} == {
        "decode": (["rollout-0"], [pytest.approx(0.75)]),
        "other": (["rollout-0"], [pytest.approx(0.25)]),
    }
    assert {trace["name"]: trace["y"] for trace in rollout.data} == {
        "generation": [pytest.approx(0.7)],
        "waiting for data": [pytest.approx(0.3)],
    }
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in trainer.data} == {"update": ([1], [1.0])}


def test_every_chart_is_valid_plotly_and_the_page_has_them_and_the_memory() -> None:
    events = [
        told(0, "rollout-0", generation=8.0, data=2.0, generation_decode=6.0),
        told(0, "trainer", update=10.0),
        memory(5, weights=2.0, other=1.0),
    ]
    run = run_of(*events, step(0, 0, 10))
    page = render(run)
    for figure in breakdown_figures(run):
        go.Figure(data=figure.data, layout=figure.layout)
        assert f'id="{figure.id}"' in page
    (embedded,) = re.findall(r'id="memory-data">(.*?)</script>', page)
    assert json.loads(embedded) == memory_chart(run)


def test_the_first_step_is_left_out_of_the_whole_but_not_of_the_steps() -> None:
    run = run_of(told(0, "trainer", other=5.0), told(5, "trainer", update=5.0), step(0, 0, 5), step(1, 5, 10))
    whole, of_steps = breakdown_figures(run)
    assert [trace["name"] for trace in whole.data] == ["update"]
    assert [trace["name"] for trace in of_steps.data] == ["update", "other work"]


def test_a_long_run_has_bars_of_several_steps() -> None:
    steps = [step(number, number, number + 1) for number in range(1000)]
    _, of_steps = breakdown_figures(run_of(*(told(number, "trainer", update=1.0) for number in range(1000)), *steps))
    (bars,) = of_steps.data
    assert len(bars["x"]) == 112
    assert bars["x"][:3] == [1, 10, 19]
    assert bars["y"] == pytest.approx([1.0] * 112)


def test_a_run_without_a_breakdown_has_none_of_its_charts() -> None:
    assert breakdown_figures(run_of(*separated_run())) == []
    assert memory_chart(run_of(*separated_run())) is None


def test_the_memory_of_a_worker_is_drawn_by_purpose() -> None:
    cells = Event(task="queue", actor="driver", start=2, end=2, metrics={"bytes": GIB})
    first = memory(1, weights=2.0, gradients=0.0, other=1.0, peak=3.0)
    second = memory(2, weights=2.0, gradients=0.5, other=1.0, peak=3.5, host=3.0)
    chart = memory_chart(run_of(first, second, cells))
    assert chart is not None
    trainer, queue = chart["workers"]
    assert (trainer["name"], trainer["time"]) == ("trainer", [1, 2])
    assert {area["name"]: area["gib"] for area in trainer["areas"]} == {
        "weights": [2.0, 2.0],
        "gradients": [0.0, 0.5],
        "other": [1.0, 1.0],
    }
    assert trainer["host"] == {"time": [2], "gib": [3.0]}
    assert [area["gib"] for area in queue["areas"]] == [[1.0]]


def test_a_point_of_a_long_run_is_the_most_of_several() -> None:
    chart = memory_chart(run_of(*(memory(at, weights=float(at % 3)) for at in range(6000))))
    assert chart is not None
    (area,) = chart["workers"][0]["areas"]
    assert area["gib"] == [2.0] * 2000
