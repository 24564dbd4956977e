"""The programs that measure workloads: how near they come to their sources, and how fast traces are read."""

import os
from pathlib import Path

import pytest
from workload_fits import Fit, fit_error_pct, fits, programming, sources
from workload_import import conversation_rows_per_s, import_rows_per_s

from tailrace.errors import TraceError
from tailrace.workloads.parameters import Figures
from tailrace.workloads.samplers.factory import library

PAGE = Path(__file__).parents[2] / "docs" / "workloads.md"
DATA = Path(os.environ.get("TAILRACE_DATA", "/nonexistent"))


@pytest.mark.skipif(not DATA.is_dir(), reason="TAILRACE_DATA does not name the folder of public traces")
def test_every_workload_that_ships_comes_within_a_tenth_of_its_source_as_the_page_tells() -> None:
    errors = fit_error_pct(fits(DATA))
    assert errors.keys() == library().keys()
    assert max(errors.values()) < 10
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    for name, error in errors.items():
        assert any(row.startswith(f"| `{name}` |") and row.endswith(f"| {error:.1f} % |") for row in rows), name


def test_the_worst_error_of_a_workload_is_of_prompts_and_responses_without_its_sign() -> None:
    compared = [
        Fit("one", "prompt tokens", {"p50": 1.0, "p90": -3.0}, ks=0.1),
        Fit("one", "response tokens", {"p50": 2.0}, ks=0.1),
        Fit("one", "turns", {"p50": 9.0}, ks=0.1),
        Fit("two", "response tokens", {"mean": 0.0}, ks=None),
    ]
    assert fit_error_pct(compared) == {"one": 3.0, "two": 0.0}


def test_the_figures_of_programming_are_read_from_the_table_of_papers(tmp_path: Path) -> None:
    (tmp_path / "papers.csv").write_text(
        'model,quantity,value\nother,"output length, mean",1\nDeepCoder-14B,"output length, mean",9329\n'
        'DeepCoder-14B,"output length, standard deviation",8651.5\n'
    )
    assert programming(tmp_path) == Figures(mean=9329.0, deviation=8651.5)


def test_a_directory_without_the_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="dapo_math_32b has no files; name a directory with PolyTrace's public data"):
        sources(tmp_path)


def test_the_files_whose_import_is_measured_can_be_imported() -> None:
    assert import_rows_per_s(rows=80) > 0
    assert conversation_rows_per_s(rows=20) > 0
