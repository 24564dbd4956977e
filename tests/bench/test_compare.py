"""Two configurations are compared by the ratios of their pairs."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.bench.compare import compare, run_turns
from tailrace.bench.figures import STAGES, Figures
from tailrace.bench.single import Result
from tailrace.errors import UserError


def result(step_s: float, *, updates: float | None = 2.0) -> Result:
    figures = Figures(
        steps=[],
        seconds=3 * step_s,
        step_s=step_s,
        stages=dict.fromkeys(STAGES, 1.0),
        samples_per_s=1.0,
        tokens_per_s=100 / step_s,
        tokens_per_s_device=50 / step_s,
        training_tokens_per_s=updates,
        tail_share=0.0,
        workers=[],
    )
    return Result(
        workload="a",
        system="tailrace",
        samples=1,
        prompt_tokens=1,
        response_tokens=1,
        longest_response=1,
        limit=1,
        cut=0,
        warm_up=1,
        figures=figures,
    )


def test_a_ratio_is_the_geometric_mean_of_the_pairs_with_students_interval() -> None:
    pairs = [(result(1.0), result(2.0)), (result(2.0), result(2.0)), (result(1.0), result(4.0))]
    step = next(one for one in compare(pairs) if one.name == "seconds a step")
    assert (step.a, step.b) == (1.0, 2.0)
    assert step.ratio == pytest.approx(2.0)
    half = 4.302653 * math.log(2) / math.sqrt(3)  # t of two degrees of freedom; the logarithms are ln 2 · (1, 0, 2)
    assert step.interval == pytest.approx((math.exp(math.log(2) - half), math.exp(math.log(2) + half)))


def test_a_single_pair_has_no_interval_and_an_unknown_figure_no_row() -> None:
    compared = compare([(result(1.0), result(2.0, updates=None))])
    assert all(one.interval is None for one in compared)
    assert {"training tokens a second", "tail share"}.isdisjoint(one.name for one in compared)


def test_both_are_run_in_turns_and_the_first_of_them_takes_turns(tmp_path: Path) -> None:
    ran: list[tuple[list[str], str]] = []

    def turn(arguments: Sequence[str], directory: Path) -> Result:
        ran.append((list(arguments), directory.name))
        return result(float(len(ran)))

    checked: list[Sequence[str]] = []
    pairs = run_turns(["math-32b"], ("", "--scale 0.5 'a=b c'"), tmp_path, 3, turn=turn, check=checked.append)
    arms = {"A": ["math-32b"], "B": ["math-32b", "--scale", "0.5", "a=b c"]}
    assert checked == [arms["A"], arms["B"]]
    assert [name for _, name in ran] == ["A-0", "B-0", "B-1", "A-1", "A-2", "B-2"]
    assert all(arguments == arms[name[0]] for arguments, name in ran)
    assert [(a.figures.step_s, b.figures.step_s) for a, b in pairs] == [(1, 2), (4, 3), (5, 6)]


def test_arguments_that_a_shell_would_not_take_are_found_before_the_first_turn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='--compare was given "it\'s": No closing quotation'):
        run_turns(["math-32b"], ("", "it's"), tmp_path, 1, turn=lambda *_: result(1.0))
