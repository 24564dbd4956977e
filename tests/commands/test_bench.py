"""`tailrace bench`: its options, its check, and two configurations in turns."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tailrace.bench.single import Result
from tailrace.commands import bench as command
from tailrace.commands.bench import Options
from tests.conftest import Command, TinyModel
from tests.helpers.bench import ADAPTER, Here, result, write_recipe
from tests.helpers.traces import write_lengths

USUAL = Options(
    warm_up=1, scale=1.0, seed=0, resample=False, random_weights=False, adapter=None, adapter_timeout_s=3600.0
)


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: TinyModel) -> Path:
    return write_recipe(tmp_path, tiny_model)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_lengths(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "options",
    [
        USUAL,
        replace(USUAL, warm_up=0, scale=0.125, seed=7, resample=True, adapter_timeout_s=2.5),
        replace(USUAL, random_weights=True, adapter="a 'b c' --d"),
    ],
)
def test_the_options_of_a_turn_are_those_that_were_given(
    tailrace_here: Command, monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    bench = Mock(return_value=0)
    monkeypatch.setattr(command, "bench", bench)
    assert tailrace_here("bench", "w", "r.yaml", "a=1", *options.arguments()).returncode == 0
    bench.assert_called_once_with("w", ["r.yaml", "a=1"], options, compare=None, rounds=None, as_json=False)


def test_a_second_recipe_is_an_error(tailrace_here: Command, trace: str) -> None:
    done = tailrace_here("bench", trace, "one", "seed=1", "two", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tailrace: 'two' is a second recipe beside 'one'; a change is KEY=VALUE\n"


def test_a_dry_run_tells_what_would_be_played_and_leaves_nothing(
    tailrace_here: Command, trace: str, recipe: Path, tmp_path: Path
) -> None:
    before = set(tmp_path.rglob("*"))
    done = tailrace_here("bench", trace, str(recipe), "sampling.max_new_tokens=12", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {tuple(line.rsplit(maxsplit=1)) for line in done.stdout.splitlines()[1:]}
    steps = {("steps", "2"), ("groups a step", "3"), ("samples of a group", "2"), ("devices", "1")}
    assert rows >= steps | {("response tokens, most", "12"), ("responses cut off", "3")}
    assert set(tmp_path.rglob("*")) == before


def test_a_dry_run_makes_no_weights(
    tailrace_here: Command,
    trace: str,
    recipe: Path,
    tmp_path: Path,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path / "cache"))
    model = f"model.path={tiny_model('llama') / 'config.json'}"
    done = tailrace_here("bench", trace, str(recipe), model, "--random-weights", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_has_no_figures_to_print_as_json(tailrace_here: Command, trace: str, recipe: Path) -> None:
    done = tailrace_here("bench", trace, str(recipe), "--dry-run", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "leave out one of them" in done.stderr


def test_rounds_are_those_of_a_comparison(tailrace_here: Command, trace: str, recipe: Path) -> None:
    done = tailrace_here("bench", trace, str(recipe), "--rounds", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--rounds is the number of pairs of --compare, which is missing" in done.stderr


def test_a_run_that_is_longer_than_its_trace_may_draw_from_it(tailrace_here: Command, trace: str, recipe: Path) -> None:
    done = tailrace_here("bench", trace, str(recipe), "trainer.steps=10", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"tailrace: {trace} has 6 groups, and the run takes 30; lower trainer.steps or trainer.train_batch_size, or "
        "draw from it with --resample\n"
    )


def test_a_dry_run_of_a_comparison_checks_both_and_runs_neither(
    tailrace_here: Command, trace: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tailrace_here)
    monkeypatch.setattr("tailrace.bench.compare.run_child", here)
    b = "engine.type=native engine.kv_cache_gib=0.00001"
    done = tailrace_here("bench", trace, str(recipe), "--compare", "trainer.steps=1 --warm-up 0", b, "--dry-run")
    assert done.returncode == 1
    (of_a, _), (of_b, message) = here.said
    assert "groups a step" in of_a
    assert of_b == ""
    assert message.startswith("tailrace: engine.kv_cache_gib 1e-05 holds")
    assert "--dry-run cannot begin" not in done.stderr
    assert f"{b} cannot begin; see its message above" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_comparison_is_checked_whole_and_then_run_in_turns(
    tailrace_here: Command, trace: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def turns(both: tuple[Sequence[str], Sequence[str]], directory: Path, rounds: int) -> list[tuple[Result, Result]]:
        done.append(f"{shlex.join(both[1])} in {directory}")
        return [(result(1.0), result(2.0))] * rounds

    monkeypatch.setattr(command, "check_arguments", lambda arguments, *, shown: done.append(shlex.join(arguments)))
    monkeypatch.setattr(command, "run_turns", turns)
    of_the_trace = "trainer.mini_batch_size=6"  # its steps have 6 samples, and those of the recipe 8
    said = tailrace_here("bench", trace, str(recipe), of_the_trace, "--compare", "", "a.b=c", "--rounds", "2", "--json")
    common = shlex.join([trace, str(recipe), of_the_trace, *USUAL.arguments()])
    assert done == [common, f"{common} a.b=c", f"{common} a.b=c in {tmp_path / 'run'}"]
    assert json.loads(said.stdout)[0] == {
        "name": "seconds a step",
        "a": 1.0,
        "b": 2.0,
        "ratio": pytest.approx(2.0),
        "interval": pytest.approx([2.0, 2.0]),
    }


def test_figures_are_printed_as_one_object(tailrace_here: Command, trace: str, recipe: Path, tmp_path: Path) -> None:
    arguments = [trace, str(recipe), "--warm-up", "0", "--adapter", ADAPTER]
    done = tailrace_here("bench", *arguments, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "run" / "bench.json").read_text())
    again = tailrace_here("bench", *arguments, f"output_dir={tmp_path / 'second'}")
    assert again.stdout.startswith(f"{trace}: 12 samples, 101 response tokens, 3 responses cut off at 12\n")
