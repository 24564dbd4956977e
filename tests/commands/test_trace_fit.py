"""`tailrace trace fit` writes parameters and says how near they come, or one line that says why not."""

from pathlib import Path

import pytest

from tailrace.workloads.files import write_trace
from tailrace.workloads.fits.choice import CHOICES
from tailrace.workloads.parameter_files import read_parameters
from tests.conftest import Command
from tests.workloads.samplers.test_fitted import draw, parameters, single


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "math.parquet"
    write_trace(draw(parameters(single(prompt_share=0.2)), steps=2, groups=50), path)
    return path


def test_the_parameters_of_a_trace_are_written_and_their_errors_printed(
    tailrace_here: Command, trace: Path, tmp_path: Path
) -> None:
    output = tmp_path / "w.yaml"
    done = tailrace_here("trace", "fit", str(trace), "--output", str(output), "--family", "lognormal")
    assert done.returncode == 0
    first, headings, *rows = done.stdout.splitlines()
    assert first == f"{output}: w, fitted to 400 samples in 100 groups and 2 steps"
    assert headings.split()[-5:] == ["KS", "p50", "p90", "p99", "most"]
    assert [row[:15].strip() for row in rows] == ["prompt tokens", "response tokens"]
    assert all(row.count("%") == 4 for row in rows)
    assert read_parameters(output).name == "w"


def test_a_name_is_given_to_the_workload(tailrace_here: Command, trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "w.yaml"
    assert tailrace_here("trace", "fit", str(trace), "--output", str(output), "--name", "mine").returncode == 0
    assert read_parameters(output).name == "mine"


def test_what_cannot_be_fitted_leaves_nothing(tailrace_here: Command, trace: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.parquet"
    write_trace(draw(parameters(single()), groups=9), few)
    output = tmp_path / "w.yaml"
    for arguments, message in {
        (str(few), str(output)): "w has 36 samples; a fit needs 100 or more",
        (str(trace), str(tmp_path / "w.txt")): "w.txt cannot be parameters; give a name that ends in .yaml",
        (str(tmp_path / "none.parquet"), str(output)): "none.parquet does not exist",
        (str(trace), str(output), "--family", "gama"): "family 'gama' is none of auto, lognormal, gamma",
    }.items():
        done = tailrace_here("trace", "fit", arguments[0], "--output", *arguments[1:])
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr
        assert not output.exists()


def test_parameters_are_replaced_only_when_asked(tailrace_here: Command, trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "w.yaml"
    output.write_text("mine")
    done = tailrace_here("trace", "fit", str(trace), "--output", str(output))
    assert (done.returncode, output.read_text()) == (2, "mine")
    assert "exists; give another file, or replace it with --force" in done.stderr
    assert tailrace_here("trace", "fit", str(trace), "--output", str(output), "--force").returncode == 0


def test_every_family_is_named_in_the_help(tailrace_here: Command) -> None:
    shown = tailrace_here("trace", "fit", "--help").stdout
    assert all(name in shown for name in CHOICES)
