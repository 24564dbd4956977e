"""Claims on the figures of a mean step, and on the section that compares them with a plan."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tailrace.errors import PlanError
from tailrace.events import Event
from tailrace.planning.foretold import Foretold
from tailrace.report.page import render, write_report
from tailrace.report.plan_section import plan_section
from tailrace.report.run_data import RunData
from tailrace.report.step_figures import figures_of, peaks_of
from tests.planning.foretold import foretold
from tests.report.synthetic import resumed_run, write_run
from tests.report.test_page import words

BEGIN = Event(task="run", actor="driver", start=0.0, end=0.0, info={"total_steps": 2})


def run_of(*events: Event) -> RunData:
    return RunData(name="run", events=events, last_event_at=datetime(2026, 1, 1, tzinfo=UTC))


def work(task: str, start: float, end: float, step: int, actor: str = "trainer", **fields: object) -> Event:
    return Event(task=task, actor=actor, start=start, end=end, step=step, **fields)  # type: ignore[arg-type]


def told(worker: str, start: float, **seconds: float) -> Event:
    end = start + sum(seconds.values())
    return Event(task="breakdown", actor=worker, start=start, end=end, metrics=seconds, worker=worker)


def sample(step: int, group: int, number: int, start: float, end: float, tokens: int) -> Event:
    info = {"group": group, "sample": number, "prompt_tokens": 10}
    return Event(task="sample", actor="engine", start=start, end=end, step=step, tokens=tokens, info=info)


def one_step(step: int, start: float) -> list[Event]:
    """Two engines generate for 4 and 2 s, a trainer computes for 3 s; four samples of two groups."""
    lengths = (40, 20, 20, 20)
    samples = [
        sample(step, 2 * step + number // 2, number % 2, start, start + 0.1 * length, length)
        for number, length in enumerate(lengths)
    ]
    return [
        *samples,
        work("reward", start + 4, start + 4.5, step, "reward", samples=2),
        work("reward", start + 4.25, start + 4.75, step, "reward", samples=2),
        work("actor", start + 5, start + 7.5, step),
        work("optimizer", start + 7.5, start + 8, step),
        told("rollout-0", start, generation=4.0, weight_transfer=0.5, data=5.5),
        told("rollout-1", start, generation=2.0, weight_transfer=0.5, data=7.5),
        told("trainer-0", start, data=5.0, update=3.0, weights=1.5, weight_transfer=0.5),
        work("step", start, start + 10, step, "driver", metrics={"staleness_mean": 0.5}),
    ]


def test_the_figures_of_a_step_are_those_of_its_events() -> None:
    run = run_of(*one_step(0, 0.0), *one_step(1, 10.0), *one_step(2, 20.0))
    found = figures_of(run)
    assert found is not None
    assert (found.steps, found.step_s, found.engines) == (2, 10.0, 2.0)
    assert (found.generation_s, found.install_s) == (3.0, 0.5)
    assert (found.training_s, found.waiting_s, found.weights_s, found.optimizer_s) == (3.0, 5.0, 2.0, 0.5)
    assert (found.reward_s, found.grading_s, found.reference_s) == (0.75, 0.25, 0.0)
    assert (found.samples, found.prompt_tokens, found.response_tokens) == (4.0, 10.0, 25.0)
    assert (found.longest_tokens, found.trained_tokens, found.staleness) == (40.0, 120.0, 0.5)
    assert found.token_s == pytest.approx(0.1)
    assert found.batch == pytest.approx(10 / 6)
    assert found.context == pytest.approx((40 * 30 + 3 * 20 * 20) / 100)
    assert found.trained_token_s == pytest.approx(2.5 / 120)


def test_new_weights_are_awaited_from_the_update_of_the_policy_on() -> None:
    events = []
    for step in range(3):
        start = 10.0 * step
        arrival = Event(task="update_weights", actor="engine", start=start + 8.5, end=start + 9, version=step + 1)
        critic = work("optimizer", start + 7, start + 8.9, step, "critic")
        events += [*one_step(step, start), critic, arrival]
    found = figures_of(run_of(*events))
    assert found is not None
    assert found.arrival_s == pytest.approx(1.0)


def test_a_run_that_has_not_told_where_its_time_went_has_no_figures() -> None:
    assert figures_of(run_of()) is None
    assert figures_of(run_of(*resumed_run())) is None
    assert plan_section(run_of(*resumed_run()), foretold()) == []
    assert plan_section(run_of(*one_step(0, 0.0)), None) == []


def test_peaks_are_the_most_of_a_kind_of_worker() -> None:
    events = [
        Event(task="memory", actor="engine", start=at, end=at, metrics={"peak": peak}, worker=worker)
        for at, worker, peak in ((1.0, "rollout-0", 5.0), (2.0, "rollout-1", 7.0), (2.0, "trainer-0", 3.0))
    ]
    assert peaks_of(run_of(*events)) == {"rollout": 7.0, "trainer": 3.0}


def test_the_section_has_both_and_says_what_was_wrong() -> None:
    (section,) = plan_section(run_of(*one_step(0, 0.0), *one_step(1, 10.0)), foretold(least_s=3.0, most_s=4.0))
    assert section.note.startswith("A step took 10 s, and 10 s were foretold")
    rows = {row["Of a mean step"]: row for row in section.table}
    assert rows["the step, s"]["Measured"] == "10"
    assert rows["an engine generates, s"] == {
        "Of a mean step": "an engine generates, s",
        "Foretold": "6",
        "Measured": "3",
        "Difference": "-50.0 %",
    }
    foreseen, measured = section.figures[0].data
    assert foreseen["x"][0] == measured["x"][0] == 10.0
    assert foreseen["y"] == measured["y"]


def test_the_page_of_a_run_with_a_plan_has_the_section_and_others_have_none(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [BEGIN, *one_step(0, 0.0), *one_step(1, 10.0)])
    assert "Plan against reality" not in words(write_report(run_dir).read_text())
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(foretold()))
    page = words(write_report(run_dir).read_text())
    assert "Plan against reality" in page
    assert "Foretold of small under math on 4 H100" in page


def test_a_damaged_plan_is_one_clear_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [BEGIN, *one_step(0, 0.0), *one_step(1, 10.0)])
    (run_dir / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match=r"plan\.json is no prediction: Object missing required field"):
        write_report(run_dir)


def test_a_plan_can_be_given_in_place_of_the_runs_own(tmp_path: Path) -> None:
    given: Foretold = foretold(of="another one")
    run = run_of(*one_step(0, 0.0), *one_step(1, 10.0))
    assert "Foretold of another one" in words(render(run, given))
