from pathlib import Path

import pytest

from tailrace.config.run import RunConfig
from tailrace.events import Event, EventLog
from tailrace.run.learning_watch import LearningWatch
from tests.helpers.runs import small_run, write_prompts

RUN = Event(task="run", actor="driver", start=0, end=0)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return small_run(tmp_path / "run", tmp_path, write_prompts(tmp_path / "prompts.jsonl"))


def step(number: int, **metrics: float) -> Event:
    """The event of a step of 8 groups of 4."""
    values = {"flat_groups": 8.0, "reward": 0.0, "response_tokens_mean": 9.0}
    return Event(
        task="step", actor="driver", start=number, end=number + 1, step=number, samples=32, metrics=values | metrics
    )


def test_a_run_that_learns_nothing_is_warned_of_after_the_step_that_shows_it(config: RunConfig) -> None:
    told: list[Event] = []
    log = EventLog(sinks=(told.append, LearningWatch(config, [told.append])))
    for number in range(12):
        log.emit(step(number))
    assert [event.task for event in told].index("warning") == 5
    [warning] = [event for event in told if event.task == "warning"]
    assert (warning.step, warning.info["kind"], warning.metrics) == (4, "flat_groups", {"flat_groups": 1.0})
    assert warning.info["text"].startswith("100% of the groups of the last 5 steps teach nothing")


def test_another_attempt_at_the_run_begins_anew(config: RunConfig) -> None:
    told: list[Event] = []
    watch = LearningWatch(config, [told.append])
    for event in [RUN, *map(step, range(4)), RUN, *map(step, range(4))]:
        watch(event)
    assert told == []
    watch(step(4))
    assert [event.step for event in told] == [4]
