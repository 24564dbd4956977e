from typing import Any, get_args

import pytest

from tailrace.planning.signs import MIN_GROUPS, WINDOW, Kind, Sign, Signs, StepFigures

OF_GRPO: list[dict[str, float]] = [
    {"reward": 0.1875, "flat_groups": 1, "truncated": 0.3438, "tokens": 31.47},
    {"reward": 0.0625, "flat_groups": 3, "truncated": 0.3125, "tokens": 28.09},
    {"reward": 0.0312, "flat_groups": 3, "truncated": 0.3438, "tokens": 29.81},
    {"reward": 0.0312, "flat_groups": 3, "truncated": 0.2812, "tokens": 29.81},
    {"reward": 0.1562, "flat_groups": 2, "truncated": 0.3125, "tokens": 28.53},
    {"reward": 0.2812, "flat_groups": 1, "truncated": 0.3125, "tokens": 33.06},
]
"""The measured figures of the first steps of recipes/grpo.yaml."""


def figures(**changes: Any) -> StepFigures:
    """The figures of a step of 4 groups of 8 that learns, with `changes`."""
    values: dict[str, Any] = {
        "groups": 4,
        "flat_groups": 1.0,
        "samples": 32,
        "failures": 0.0,
        "truncated": 0.1,
        "tokens": 100.0,
        "reward": 0.25,
        "entropy": 1.0,
    }
    return StepFigures(**values | changes)


def told(*steps: StepFigures) -> list[list[str]]:
    """The kinds of the signs that begin with each step."""
    signs = Signs()
    return [[sign.kind for sign in signs.add(step)] for step in steps]


def first_sign(*steps: StepFigures) -> Sign:
    signs = Signs()
    return next(sign for step in steps for sign in signs.add(step))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("flat_groups", {"flat_groups": 4.0, "reward": 0.0}, "100% of the groups of the last 5 steps"),
        ("truncated", {"truncated": 0.625}, "62% of the responses"),
        ("reward_failures", {"failures": 24.0}, "75% of the gradings"),
    ],
)
def test_what_stands_from_the_start_is_told_once_with_its_figure_and_remedies(
    kind: str, changes: dict[str, float], said: str
) -> None:
    steps = [figures(**changes)] * 20
    assert told(*steps) == [[]] * (WINDOW - 1) + [[kind]] + [[]] * (20 - WINDOW)
    sign = first_sign(*steps)
    assert said in sign.text
    assert "Usual remedies: " in sign.text


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("length_explosion", {"tokens": 450.0}),
        ("length_collapse", {"tokens": 20.0, "reward": 0.1}),
        ("entropy_collapse", {"entropy": 0.05, "flat_groups": 3.5}),
    ],
)
def test_what_changes_for_the_worse_since_the_start_is_told(kind: str, changes: dict[str, float]) -> None:
    kinds = [sign for step in told(*[figures()] * 10, *[figures(**changes)] * 10) for sign in step]
    assert kinds == [kind]


def test_each_kind_of_sign_is_known_by_name() -> None:
    bad = [
        figures(flat_groups=4.0, truncated=1.0, failures=32.0, tokens=1.0, entropy=0.0, reward=0.0),
        figures(tokens=1000.0),
    ]
    kinds = {kind for worse in bad for step in told(*[figures()] * 10, *[worse] * 10) for kind in step}
    assert kinds == set(get_args(Kind))


def test_the_first_steps_of_the_recipe_grpo_are_no_sign() -> None:
    steps = [figures(**step) for step in OF_GRPO]
    assert told(*steps, *steps, *steps) == [[]] * 18


def test_what_goes_with_learning_is_no_sign() -> None:
    better = {"tokens": 20.0, "reward": 0.5}, {"tokens": 800.0, "reward": 0.3}, {"entropy": 0.05, "flat_groups": 2.0}
    for changes in better:
        assert told(*[figures()] * 10, *[figures(**changes)] * 10) == [[]] * 20


def test_a_few_steps_without_signal_are_no_sign() -> None:
    flat = figures(flat_groups=4.0)
    assert told(*[flat] * 4, figures(), *[flat] * 4, figures(flat_groups=2.0)) == [[]] * 10


def test_steps_of_one_group_are_judged_by_as_many_groups() -> None:
    steps = [figures(groups=1, samples=8, flat_groups=1.0)] * 20
    assert told(*steps).index(["flat_groups"]) == MIN_GROUPS - 1


def test_a_sign_that_comes_and_goes_is_told_when_it_was_over_for_a_while() -> None:
    bad, good = figures(truncated=0.9), figures()
    flicker = told(*[bad] * 5, *[bad, good, good, bad, bad] * 4)
    assert sum(map(len, flicker)) == 1
    assert sum(map(len, told(*[bad] * 5, *[good] * 12, *[bad] * 5))) == 2


def test_nothing_is_said_of_figures_that_are_not_known() -> None:
    metrics = {"reward_failures": 8.0}
    steps = [StepFigures.of(metrics, groups=4, samples=32)] * 20
    assert told(*steps) == [[]] * 20
