"""The register of metrics, and the page that is written from it."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tailrace.events import Event
from tailrace.planning.signs import Kind
from tailrace.registers import metrics
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import METRICS, Metric, Shown, charted_in, has_chart, metric, shown_in
from tailrace.registers.phases import STATES
from tailrace.registers.reference import reference
from tailrace.report.display import plain_lines
from tailrace.report.progress import Progress
from tailrace.report.text import write


def names_of(kind: EventKind) -> set[str]:
    return {entry.name for entry in METRICS if kind in entry.of}


def test_the_page_is_what_the_registers_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == reference(), "`make docs` writes it"


def test_no_kind_of_event_has_a_metric_twice() -> None:
    pairs = [(kind, entry.name) for entry in METRICS for kind in entry.of]
    assert len(pairs) == len(set(pairs))


def test_every_metric_of_a_step_has_a_group_of_the_page() -> None:
    assert [entry.name for entry in METRICS if (EventKind.STEP in entry.of) != (entry.group is not None)] == []


def test_the_register_has_the_signs_that_a_run_may_give_and_the_states_of_a_worker() -> None:
    assert names_of(EventKind.WARNING) == set(get_args(Kind))
    assert names_of(EventKind.ACTIVITY) == set(STATES)


def test_metrics_have_titles_with_units() -> None:
    assert metric("response_tokens_mean").full_title == "Mean response (tokens)"


def test_an_unknown_metric_is_called_by_its_name() -> None:
    assert metric("queue_depth").full_title == "Queue depth"


def test_a_metric_of_other_events_is_not_taken_for_one_of_steps() -> None:
    assert metric("rows").full_title == "Rows"
    assert metric("flat_groups").unit == "groups"


def test_better_is_the_direction_that_one_wants() -> None:
    for name, change in (("reward", 0.5), ("reward_failures", -1.0)):
        assert metric(name).is_better(change)
        assert not metric(name).is_better(-change)
    assert not metric("lr").is_better(1.0)
    assert not metric("lr").is_better(-1.0)


def test_a_family_is_charted_by_its_prefix() -> None:
    assert has_chart("time/rollout")
    assert has_chart("staleness/3")
    assert not has_chart("reward/format")
    assert "time/<task>" not in charted_in("Speed")


def test_a_new_metric_is_shown_where_its_entry_says(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Metric(name="surprise", meaning="", shown=Shown.LINE, is_fraction=True, chart="Optimization")
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, new))
    assert "surprise" in shown_in(Shown.LINE)
    assert charted_in("Optimization")[-1] == "surprise"
    step = Event(task="step", actor="driver", start=0, end=1, step=0, metrics={"surprise": 0.25})
    assert "surprise 25.0 %" in next(plain_lines(step, Progress()))


@pytest.mark.parametrize("name", ["pass@4", "maj@16", "sampled/accuracy", "hard/sampled/pass@8"])
def test_a_figure_of_a_set_or_a_way_is_written_as_the_figure_itself(name: str) -> None:
    assert write(metric(name), 0.125) == "12.5 %"
    assert metric(name).words == name.capitalize()


@pytest.mark.parametrize("name", ["sampled/reward_failures/timeout", "hard/reward/accuracy", "hard/sampled/spent/cost"])
def test_a_figure_of_a_family_is_the_same_of_every_set(name: str) -> None:
    base = metric(name.removeprefix("hard/").removeprefix("sampled/"))
    assert base.meaning
    assert metric(name) == replace(base, name=name)
