"""The figures of a benchmark, against ones worked out by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench.figures import figures_of
from tailrace.errors import BenchError, UserError
from tailrace.events import Event


def event(task: str, start: float, end: float, step: int | None = 0, **more: Any) -> Event:
    return Event(**{"task": task, "actor": "x", "start": start, "end": end, "step": step, **more})


def two_steps() -> list[Event]:
    """The first step is from 1 to 5, the second from 5 to 15."""
    ends = (6, 7, 7, 8, 8, 8, 9, 9, 10, 13)
    samples = [
        event("sample", 5, end, 1, tokens=10, info={"group": 1, "sample": number}) for number, end in enumerate(ends)
    ]
    lost = event("sample", 5, 5.5, 1, tokens=10, info={"group": 1, "sample": 0})
    return [
        lost,
        event("rollout", 1, 4),
        event("sample", 1, 4, tokens=7),
        event("step", 1, 5),
        event("rollout", 4.5, 8, 1),
        event("rollout", 7, 9, 1),
        event("rollout", 12, 13, 1),
        *samples,
        event("reward", 9, 9.5, 1),
        event("actor", 13, 14, 1),
        event("optimizer", 14, 14.5, 1),
        event("update_weights", 14.5, 15.5, None),
        event("step", 5, 15, 1),
        event("activity", 3, 7, None, metrics={"busy": 2.0, "data": 2.0, "weights": 0.0, "idle": 0.0}),
        event("breakdown", 4, 6, None, metrics={"generation": 2.0, "generation/decode": 1.5}),
        event("breakdown", 6, 16, None, metrics={"generation": 5.0, "generation/decode": 5.0, "data": 5.0}),
        event("memory", 2, 2, None, metrics={"peak": 3 * 2**30}),
        event("memory", 9, 9, None, metrics={"peak": 2**30}),
        event("activity", 7, 16, None, metrics={"busy": 9.0, "data": 0.0, "weights": 0.0, "idle": 0.0}),
    ]


def test_steps_after_the_warm_up_are_measured_from_the_end_of_the_one_before() -> None:
    figures = figures_of(two_steps(), warm_up=1, devices=2)
    [step] = figures.steps
    assert (step.step, step.seconds, step.samples, step.response_tokens) == (1, 10, 10, 100)
    expected = {"generation": 4 + 1, "reward": 0.5, "reference": 0, "advantage": 0, "update": 1.5, "weights": 0.5}
    assert step.stages == expected
    assert figures.stages == expected
    assert (figures.seconds, figures.step_s, figures.samples_per_s, figures.tokens_per_s) == (10, 10, 1, 10)
    assert figures.tokens_per_s_device == 5
    assert figures.training_tokens_per_s == pytest.approx(100 / 1.5)


def test_the_tail_begins_when_nine_tenths_of_the_samples_are_done() -> None:
    assert figures_of(two_steps(), warm_up=1, devices=1).tail_share == pytest.approx((13 - 10) / (13 - 5))


def test_activity_counts_as_far_as_it_lasts_within_the_measured_time() -> None:
    [worker] = figures_of(two_steps(), warm_up=1, devices=1).workers
    busy, data = 2 * 2 / 4 + 9 * 8 / 9, 2 * 2 / 4
    assert worker.shares == pytest.approx({"busy": busy / 10, "data": data / 10, "weights": 0, "idle": 0})
    assert worker.phases == pytest.approx({"generation": (1 + 4.5) / 10, "data": 4.5 / 10})
    parts = {"decode": (0.75 + 4.5) / 10, "prefill": 0, "sampling": 0, "communication": 0, "scheduling": 0}
    assert {part: worker.parts["generation"].get(part, 0) for part in parts} == pytest.approx(parts)
    assert sum(worker.parts["generation"].values()) == pytest.approx(worker.phases["generation"])
    assert worker.peak_memory_gib == 3


def test_without_a_warm_up_the_time_begins_with_the_first_work() -> None:
    figures = figures_of(two_steps(), warm_up=0, devices=1)
    assert [step.seconds for step in figures.steps] == [4, 10]
    assert figures.step_s == 7


def test_a_step_that_ends_before_it_can_begin_is_an_error() -> None:
    with pytest.raises(BenchError, match="step 1 ends at 2 s; expected a time after 2 s"):
        figures_of([event("rollout", 0, 1), event("step", 0, 2), event("step", 1, 2, 1)], warm_up=1, devices=1)


def test_a_process_that_holds_several_workers_has_its_memory_alone() -> None:
    memory = Event(task="memory", actor="driver", start=2, end=2, metrics={"peak": 2.0 * 2**30})
    workers = figures_of([*two_steps(), memory], warm_up=1, devices=1).workers
    assert [(w.shares, w.peak_memory_gib) for w in workers if w.worker == "driver"] == [({}, 2.0)]


def test_a_run_that_is_all_warm_up_is_an_error() -> None:
    with pytest.raises(UserError, match=r"the run has 2 steps, and 2 of them warm up; raise trainer\.steps"):
        figures_of(two_steps(), warm_up=2, devices=1)


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), max_size=8))
def test_a_stage_is_at_work_for_as_long_as_any_of_its_spans_lasts(spans: list[tuple[float, float]]) -> None:
    rollouts = [event("rollout", min(span), max(span), None) for span in spans]
    grid = [5 + 0.005 + 0.01 * place for place in range(1000)]
    counted = sum(any(one.start <= time < one.end for one in rollouts) for time in grid) * 0.01
    figures = figures_of([event("step", 0, 5), event("step", 5, 15, 1), *rollouts], warm_up=1, devices=1)
    assert figures.stages["generation"] == pytest.approx(counted, abs=0.01 * (2 * len(spans) + 1))
