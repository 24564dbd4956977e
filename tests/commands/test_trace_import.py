"""`tailrace trace import` writes a trace, or one line that says why not."""

from pathlib import Path

import pytest

from tailrace.commands.trace_import import names_of
from tailrace.workloads.files import read_trace
from tailrace.workloads.importers.factory import IMPORTERS
from tests.conftest import Command

GROUPS = '{"group": 4, "prompt_len": 10, "out_lens": [3, 1]}\n{"group": 2, "prompt_len": 8, "out_lens": [2]}\n'


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    path = tmp_path / "groups.jsonl"
    path.write_text(GROUPS)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_trace_has_the_provenance_that_was_given(
    tailrace_here: Command, groups: Path, tmp_path: Path, name: str
) -> None:
    output = tmp_path / name
    facts = ["--task", "mathematics", "--model", "a model", "--max-new-tokens", "5"]
    done = tailrace_here("trace", "import", str(groups), "--output", str(output), *facts)
    assert (done.returncode, done.stdout) == (0, f"{output}: 3 samples in 2 groups and 1 step\n")
    trace = read_trace(output)
    assert trace.samples["task"].unique().to_list() == ["mathematics"]
    assert trace.provenance.source == "groups.jsonl"
    assert trace.provenance.model == "a model"
    assert trace.provenance.max_new_tokens == 5


def test_the_source_of_many_files_is_named_in_a_line() -> None:
    assert names_of([Path("a/one.jsonl")]) == "one.jsonl"
    assert names_of([Path("a/one.jsonl"), Path("b/two.jsonl")]) == "one.jsonl and 1 more"


def test_what_cannot_be_imported_leaves_nothing(tailrace_here: Command, groups: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.parquet"
    for arguments, message in {
        ("--max-new-tokens", "2"): "groups.jsonl, row 1 (step 0, group 4, sample 0): response_tokens is 3; expected",
        ("--format", "azure"): f"{groups} does not begin as the Azure trace",
        (
            "--format",
            "group",
        ): "format 'group' is none of polytrace, groups, azure, mooncake, servegen, polytrace-math, polytrace-tools"
        "; did you mean 'groups'?",
    }.items():
        done = tailrace_here("trace", "import", str(groups), "--output", str(output), *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        assert not output.exists()
    done = tailrace_here("trace", "import", str(groups), "--output", str(tmp_path / "a.csv"))
    assert "give a name that ends in .parquet or .jsonl" in done.stderr


def test_a_trace_is_replaced_only_when_asked(tailrace_here: Command, groups: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.parquet"
    output.write_text("mine")
    done = tailrace_here("trace", "import", str(groups), "--output", str(output))
    assert (done.returncode, output.read_text()) == (2, "mine")
    assert "exists; give another file, or replace it with --force" in done.stderr
    assert tailrace_here("trace", "import", str(groups), "--output", str(output), "--force").returncode == 0


def test_an_input_is_never_replaced(tailrace_here: Command, groups: Path) -> None:
    done = tailrace_here("trace", "import", str(groups), "--output", str(groups), "--force")
    assert (done.returncode, groups.read_text()) == (2, GROUPS)
    assert "is an input of this command; give another file" in done.stderr


def test_every_format_is_named_in_the_help_and_on_its_page(tailrace_here: Command) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    shown = tailrace_here("trace", "import", "--help").stdout
    for name in IMPORTERS:
        assert name in shown
        assert f"| `{name}` |" in page
