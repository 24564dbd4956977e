"""Claims on what is said of a plan that was wrong."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.foretold import StepFigures
from tailrace.planning.reality import verdict, wrong_assumptions
from tests.planning.foretold import FIGURES, figures, foretold


def generating(seconds: float, **changes: Any) -> StepFigures:
    """A run whose trainer waits for samples for so much longer than planned, since engines take so much longer."""
    return figures(
        step_s=FIGURES.step_s + seconds,
        waiting_s=FIGURES.waiting_s + seconds,
        generation_s=FIGURES.generation_s + seconds,
        **changes,
    )


def training(seconds: float, **changes: Any) -> StepFigures:
    return figures(step_s=FIGURES.step_s + seconds, training_s=FIGURES.training_s + seconds, **changes)


LONGER: dict[str, Any] = {"response_tokens": 800.0, "longest_tokens": 2000.0, "trained_tokens": 64 * 800.0 + 800}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (generating(6.0, **LONGER), "about the work that there was: responses were longer, 800 instead of 400 tokens"),
        (generating(6.0, longest_tokens=3000.0), "the longest response of a step had 3,000 instead of 1,000 tokens"),
        (generating(6.0, engines=1.0, batch=40.0), "1 instead of 2 engines generated"),
        (generating(6.0, samples=128.0, trained_tokens=2 * 26_400.0), "a step had 128 instead of 64 responses"),
        (
            generating(6.0, token_s=0.04),
            "about the time that work takes: a decode step of 20 responses took 40 instead",
        ),
        (generating(6.0, batch=10.0, token_s=0.015), "an engine had 10 instead of 20 responses at a time"),
        (training(3.0), "training took 208 instead of 94.7 µs a token"),
        (training(3.0, optimizer_s=3.5), "the optimizer took 3.5 instead of 0.5 s a step"),
        (training(2.0, **LONGER), "responses were longer, 800 instead of 400 tokens in the mean"),
        (figures(step_s=12.0, weights_s=2.5), "weights took 2.5 instead of 0.5 s a step"),
        (generating(-3.0, response_tokens=200.0, longest_tokens=500.0), "responses were shorter, 200 instead of 400"),
        (
            figures(step_s=13.0, waiting_s=9.2, reward_s=3.5, grading_s=0.07),
            "a grading took 70 instead of 10 ms",
        ),
        (
            figures(step_s=13.0, waiting_s=9.2, reference_s=3.4),
            "the reference took 129 instead of 15.2 µs a token",
        ),
    ],
)
def test_the_assumption_that_was_wrong_is_named(run: StepFigures, said: str) -> None:
    text = verdict(foretold(), run)
    assert said in text
    assert "The plan was wrong" in text
    assert text.count(". ") == 2, "two sentences and the figures"


def test_lengths_do_not_count_as_slowness() -> None:
    """Twice the tokens take twice the time: no time of a unit of work was wrong."""
    run = figures(
        step_s=19.2,
        waiting_s=12.4,
        generation_s=12.0,
        training_s=5.5,
        batch=20.0,
        **LONGER,
    )
    assert {one.about for one in wrong_assumptions(foretold(), run)} == {"work"}


def test_slowness_does_not_count_as_lengths() -> None:
    run = figures(step_s=16.2, waiting_s=12.4, generation_s=12.0, token_s=0.04)
    assert [one.about for one in wrong_assumptions(foretold(), run)] == ["times"]


def test_a_fuller_batch_takes_longer_and_that_is_no_slowness() -> None:
    """10 + 30 ms instead of 10 + 10, as the plan's own step times say."""
    run = generating(3.0, engines=2 / 3, batch=60.0, token_s=0.04)
    (found,) = wrong_assumptions(foretold(), run)
    assert "engines generated" in found.text


def test_two_assumptions_are_named_where_both_were_wrong() -> None:
    text = verdict(foretold(), generating(12.0, token_s=0.04, **LONGER))
    assert "responses were longer" in text
    assert "; besides, a decode step of 20 responses" in text or "; besides, responses were longer" in text


def test_a_critic_that_holds_the_step_up_is_named() -> None:
    """The trainer waits for it at the end of a step, or for its values before."""
    plan = foretold(figures=figures(critic_s=4.0))
    slow = figures(step_s=13.0, critic_s=8.0)
    assert "the critic took 303 instead of 152 µs a token" in verdict(plan, slow)
    assert "the critic took" in verdict(plan, figures(step_s=13.0, waiting_s=9.2, critic_s=8.0))


def test_a_step_as_foretold_is_right_whatever_its_parts() -> None:
    assert verdict(foretold(), FIGURES).endswith("10 s were foretold, from 9 to 11 s. The plan was right.")
    within = verdict(foretold(), generating(0.8, token_s=0.024))
    assert "The plan was right within its bounds" in within
    assert "a decode step" in within


def test_what_no_assumption_explains_is_said_to_be_so() -> None:
    text = verdict(foretold(), figures(step_s=14.0))
    assert "None of its assumptions says why" in text
    assert "did other things for 4.3 s" in text


factors = st.floats(0.1, 10.0)


@given(st.dictionaries(st.sampled_from([n for n in StepFigures.__struct_fields__ if n != "steps"]), factors))
def test_any_run_has_a_verdict(changes: dict[str, float]) -> None:
    run = figures(**{name: factor * getattr(FIGURES, name) for name, factor in changes.items()})
    text = verdict(foretold(), run)
    assert text.startswith("A step took ")
    assert text.endswith(".")
    for one in wrong_assumptions(foretold(), run):
        assert math.isfinite(one.effect)
        assert one.effect * (run.step_s - FIGURES.step_s) >= 0
