"""Two configurations are compared by the ratios of their pairs."""

import math
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from tailrace.bench.compare import both_arguments, check_arguments, comparisons, process_turn, run_turns
from tailrace.bench.single import Interrupted, Result
from tailrace.errors import BenchError, UserError
from tests.conftest import Command
from tests.helpers.bench import ADAPTER, Here, result
from tests.helpers.traces import write_lengths


def test_a_ratio_is_the_geometric_mean_of_the_pairs_with_students_interval() -> None:
    pairs = [(result(1.0), result(2.0)), (result(2.0), result(2.0)), (result(1.0), result(4.0))]
    step = next(one for one in comparisons(pairs) if one.name == "seconds a step")
    assert (step.a, step.b) == (1.0, 2.0)
    assert step.ratio == pytest.approx(2.0)
    half = 4.302653 * math.log(2) / math.sqrt(3)  # t of two degrees of freedom; the logarithms are ln 2 · (1, 0, 2)
    assert step.interval == pytest.approx((math.exp(math.log(2) - half), math.exp(math.log(2) + half)))


def test_a_single_pair_has_no_interval_and_an_unknown_figure_no_row() -> None:
    compared = comparisons([(result(1.0), result(2.0, updates=None))])
    assert all(one.interval is None for one in compared)
    assert {"training tokens a second", "tail share"}.isdisjoint(one.name for one in compared)


def test_both_are_run_in_turns_and_the_first_of_them_takes_turns(tmp_path: Path) -> None:
    ran: list[tuple[list[str], str]] = []

    def turn(arguments: Sequence[str], directory: Path) -> Result:
        ran.append((list(arguments), directory.name))
        return result(float(len(ran)))

    both = both_arguments(["math-32b"], ("", "--scale 0.5 'a=b c'"))
    pairs = run_turns(both, tmp_path, 3, turn=turn)
    arms = {"A": ["math-32b"], "B": ["math-32b", "--scale", "0.5", "a=b c"]}
    assert [name for _, name in ran] == ["A-0", "B-0", "B-1", "A-1", "A-2", "B-2"]
    assert all(arguments == arms[name[0]] for arguments, name in ran)
    assert [(a.figures.step_s, b.figures.step_s) for a, b in pairs] == [(1, 2), (4, 3), (5, 6)]


def test_arguments_that_a_shell_would_not_take_are_an_error() -> None:
    with pytest.raises(UserError, match='--compare was given "it\'s": No closing quotation'):
        both_arguments(["math-32b"], ("", "it's"))
    with pytest.raises(UserError, match="--compare was given --dry-run as a configuration; give it two"):
        both_arguments(["math-32b"], ("trainer.steps=2", "--dry-run"))  # as where B was forgotten


def test_a_turn_has_a_directory_of_its_own(
    tmp_path: Path, recipe: Path, tailrace_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.bench.compare.run_child", Here(tailrace_here))
    arguments = [write_lengths(tmp_path / "a.parquet"), str(recipe), "--warm-up", "0", "--adapter", ADAPTER]
    made = process_turn(arguments, tmp_path / "A-0")
    assert (made.samples, made.system) == (12, ADAPTER)
    assert (tmp_path / "A-0" / "bench.json").is_file()
    with pytest.raises(BenchError, match="the turn A-0 ended with exit code 2; see its output above"):
        process_turn(arguments, tmp_path / "A-0")


def test_ctrl_c_in_a_turn_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in (lambda *_, **__: 130, Mock(side_effect=KeyboardInterrupt)):
        monkeypatch.setattr("tailrace.bench.compare.run_child", end)
        with pytest.raises(Interrupted):
            process_turn(["a"], tmp_path)


def test_a_check_runs_nothing(
    tmp_path: Path, recipe: Path, tailrace_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.bench.compare.run_child", Here(tailrace_here))
    arguments = [write_lengths(tmp_path / "a.parquet"), str(recipe)]
    check_arguments(arguments)
    with pytest.raises(BenchError, match="--adapter no-such-program cannot begin; see its message above"):
        check_arguments([*arguments, "--adapter", "no-such-program"])
    assert not (tmp_path / "run").exists()
