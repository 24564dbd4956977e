"""What is said of a plan is true: runs are simulated in which one thing is not as it was planned."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import pytest

from tailrace.commands.foretell import Simulation, foretell
from tailrace.events import Event
from tailrace.planner.candidates import Candidates
from tailrace.planner.modes import USUAL, Mode
from tailrace.planner.trial import counted_steps, played, scenario_for
from tailrace.planning.foretold import Foretold, StepFigures
from tailrace.planning.reality import verdict
from tailrace.report.run_data import RunData, step_of
from tailrace.report.step_figures import figures_of
from tailrace.simulator.scenario import Scenario
from tailrace.workloads.replay import Replay
from tests.planner.problems import problem_of

Change = Callable[[Scenario], Scenario]


class Slower:
    """Times that are longer by a factor; those in `same` are not."""

    def __init__(self, times: Any, factor: float, same: tuple[str, ...] = ()) -> None:
        self._times, self._factor, self._same = times, factor, same

    def __getattr__(self, name: str) -> Callable[..., float]:
        factor = 1.0 if name in self._same else self._factor
        return lambda *given: factor * getattr(self._times, name)(*given)


def engines(scenario: Scenario, **changes: Callable[[Any], Any]) -> Scenario:
    """The scenario with engines of which some values are another function of themselves."""
    return replace(
        scenario,
        engines=tuple(
            replace(kind, **{name: change(getattr(kind, name)) for name, change in changes.items()})
            for kind in scenario.engines
        ),
    )


def slow_trainer(scenario: Scenario) -> Scenario:
    times = Slower(scenario.trainer.times, 12.0, ("optimizer_s",))
    return replace(scenario, trainer=replace(scenario.trainer, times=times))


@cache
def planned(mode: Mode) -> tuple[Simulation, Foretold]:
    problem = problem_of("8xH100", "sampling.max_new_tokens=65536", steps=1)
    several = (one for one in Candidates(problem).of(mode) if one.engines.engines * one.engines.dp >= 2)
    best = min(several, key=lambda one: one.bound.seconds)
    made = Simulation(
        of="a test",
        scenario=partial(scenario_for, problem, best),
        drawn=problem.drawn,
        config=mode.applied(problem.config),
        kind="analytic",
        spread=(0.75, 1.33),
        memory={},
    )
    return made, foretell(made)


def measured(made: Simulation, change: Change, drawn: Replay) -> StepFigures:
    events: list[Event] = []
    groups, ahead = made.config.groups_per_step, made.config.pipeline.max_staleness
    played(
        lambda steps: change(made.scenario(steps)), drawn, (events.append,), groups=groups, ahead=ahead, samples=True
    )
    run = RunData(name="run", events=events, last_event_at=datetime(2026, 1, 1, tzinfo=UTC))
    numbers = counted_steps(drawn, groups=groups, ahead=ahead)
    figures = figures_of(run, [step for step in run.steps if step_of(step) in numbers])
    assert figures is not None
    return figures


CAUSES: dict[str, tuple[Change, Callable[[Replay], Replay], str]] = {
    "slow engines": (
        lambda scenario: engines(scenario, times=lambda times: Slower(times, 1.6)),
        lambda drawn: drawn,
        "time that work takes: a decode step of ",
    ),
    "slow training": (slow_trainer, lambda drawn: drawn, "time that work takes: training took "),
    "longer responses": (
        lambda scenario: scenario,
        lambda drawn: drawn.map(lambda script: script.scaled(1.7)),
        "work that there was: responses were longer",
    ),
    "shorter responses": (
        lambda scenario: scenario,
        lambda drawn: drawn.map(lambda script: script.scaled(0.5)),
        "work that there was: responses were shorter",
    ),
    "slow grading": (
        lambda scenario: scenario,
        lambda drawn: drawn.map(lambda script: replace(script, reward_s=1.0)),
        "time that work takes: a grading took 1,000 instead of 0 ms",
    ),
    "late weights": (
        lambda scenario: engines(scenario, arrive_s=lambda seconds: seconds + 5.0),
        lambda drawn: drawn,
        " weights",
    ),
}


@pytest.mark.parametrize("mode", USUAL, ids=str)
@pytest.mark.parametrize("cause", CAUSES)
def test_the_one_thing_that_is_not_as_planned_is_what_is_named(cause: str, mode: Mode) -> None:
    made, foretold = planned(mode)
    change, drawn, said = CAUSES[cause]
    text = verdict(foretold, measured(made, change, drawn(made.drawn)))
    assert "The plan was wrong" in text
    assert said in text
    assert "; besides" not in text


@pytest.mark.parametrize("mode", USUAL, ids=str)
def test_a_run_as_planned_has_the_very_figures(mode: Mode) -> None:
    made, foretold = planned(mode)
    run = measured(made, lambda scenario: scenario, made.drawn)
    assert run == foretold.figures
    assert verdict(foretold, run).endswith("The plan was right.")
