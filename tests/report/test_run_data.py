import math
from pathlib import Path

import pytest

from tailrace.errors import UserError
from tailrace.events import Event, EventFile, EventLog
from tailrace.report.run_data import drop_superseded, first_and_last, load_run, metric_series
from tests.report.synthetic import SyntheticRun, resumed_run, write_run


def test_a_resumed_run_has_each_step_once_from_its_newest_attempt(tmp_path: Path) -> None:
    events = resumed_run()
    run = load_run(write_run(tmp_path, events))
    newest = {event.step: event for event in events if event.task == "step"}
    assert [event.step for event in run.steps] == list(range(60))
    assert run.steps == [newest[step] for step in range(60)]
    assert len(run.samples) == 60 * 32
    assert run.resumes == 1


def test_what_was_evaluated_before_the_resume_is_kept_once(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, resumed_run()))
    assert [event.step for event in run.of("evaluation")] == [0, 20, 40, 60]
    assert run.evaluations == list(run.of("evaluation"))


def test_weight_updates_of_lost_steps_are_dropped() -> None:
    versions = [event.version for event in drop_superseded(resumed_run()) if event.task == "update_weights"]
    assert versions == list(range(1, 61))


def test_a_second_resume_supersedes_both_attempts_before_it() -> None:
    run = SyntheticRun(total_steps=12, samples=4, evaluate_every=4)
    attempts = [*run.attempt(0, 10), *run.attempt(8, 9, resumed_from="8"), *run.attempt(4, 6, resumed_from="4")]
    assert [event.step for event in drop_superseded(attempts) if event.task == "step"] == [0, 1, 2, 3, 4, 5]


def test_work_of_an_interrupted_step_that_the_checkpoint_holds_is_kept() -> None:
    """Ctrl-C saves the finished samples, so the resumed run does not make them again."""
    run = SyntheticRun(total_steps=4, samples=4)
    before = [event for event in run.attempt(0, 2) if not (event.task == "step" and event.step == 1)]
    saved = Event(
        task="checkpoint", actor="trainer", start=run.clock, end=run.clock + 1, info={"path": "checkpoints/1"}
    )
    again = Event(task="run", actor="driver", start=run.clock, end=run.clock, info={"resumed_from": "checkpoints/1"})
    assert drop_superseded([*before, saved, again]) == [*before, saved, again]


def test_work_that_was_going_on_while_the_checkpoint_was_taken_is_dropped() -> None:
    late = Event(task="sample", actor="engine", start=1.0, end=3.0, step=1)
    again = Event(task="run", actor="driver", start=2.0, end=2.0, info={"resumed_from": "checkpoints/1"})
    assert drop_superseded([late, again]) == [again]


def test_a_death_after_the_checkpoint_counts_at_the_time_where_the_run_goes_on() -> None:
    died = Event(task="worker_died", actor="trainer", start=3.0, end=3.0, info={"how": "SIGKILL"})
    again = Event(task="run", actor="driver", start=2.0, end=2.0, info={"resumed_from": "checkpoints/1"})
    kept, _ = drop_superseded([died, again])
    assert (kept.task, kept.start, kept.end, kept.info) == ("worker_died", 2.0, 2.0, died.info)


def test_no_two_attempts_overlap_in_time() -> None:
    kept = drop_superseded(resumed_run())
    resumed = next(event for event in kept if event.info.get("resumed_from"))
    earlier = [event for event in kept[: kept.index(resumed)] if event.task != "checkpoint"]
    assert max(event.end for event in earlier) <= resumed.start


def test_a_run_is_finished_when_its_last_step_is(tmp_path: Path) -> None:
    run = SyntheticRun(total_steps=4, samples=4)
    events = list(run.attempt(0, 3))
    assert not load_run(write_run(tmp_path, events)).is_finished
    assert load_run(write_run(tmp_path, [*events, *run.attempt(3, 4, resumed_from="3")])).is_finished


def test_metrics_that_are_not_finite_or_missing_are_passed_over() -> None:
    rewards = (0.5, math.nan, None, 0.7)
    steps = [
        Event(task="step", actor="driver", start=0, end=1, step=step, metrics={} if reward is None else {"r": reward})
        for step, reward in enumerate(rewards)
    ]
    assert metric_series(steps, "r") == ([1, 4], [0.5, 0.7])


def test_a_run_with_a_metric_that_is_not_finite_can_be_read(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    EventLog(sinks=(file,)).emit(
        Event(task="step", actor="driver", start=0, end=1, step=0, metrics={"loss": math.nan, "reward": 1.0})
    )
    file.close()
    assert load_run(tmp_path).steps[0].metrics == {"reward": 1.0}


@pytest.mark.parametrize(
    ("values", "ends"),
    [([4.0], (4, 4)), ([1.0, 3.0], (1, 3)), ([1.0, 2.0, 6.0], (1, 6)), ([float(n) for n in range(20)], (2, 17))],
)
def test_first_and_last_values_never_overlap(values: list[float], ends: tuple[float, float]) -> None:
    assert first_and_last(values) == ends


def test_a_directory_that_is_no_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the directory of a run: it has no events\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="nowhere is not the directory of a run"):
        load_run(tmp_path / "nowhere")


def test_a_run_that_recorded_nothing_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recorded nothing"):
        load_run(write_run(tmp_path, []))
