"""`tailrace trace sample` draws a trace, and `tailrace trace workloads` lists what it can be drawn from."""

from pathlib import Path

from tailrace.workloads.files import read_trace, write_trace
from tailrace.workloads.samplers.factory import library
from tests.conftest import Command
from tests.workloads.samplers.test_fitted import draw, parameters, single

AMOUNTS = ["--steps", "2", "--groups", "6", "--group-size", "3", "--seed", "4"]


def test_a_trace_is_drawn_from_a_workload_that_ships(tailrace_here: Command, tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        output = tmp_path / name
        done = tailrace_here("trace", "sample", "search-7b", "--output", str(output), *AMOUNTS)
        assert (done.returncode, done.stdout) == (0, f"{output}: 36 samples in 12 groups and 2 steps\n")
    first, second = (read_trace(tmp_path / name) for name in ("a.parquet", "b.parquet"))
    assert first.samples.equals(second.samples)
    assert first.provenance.source == "search-7b"


def test_groups_of_a_trace_are_drawn_again(tailrace_here: Command, tmp_path: Path) -> None:
    recorded, output = tmp_path / "r.parquet", tmp_path / "o.jsonl"
    write_trace(draw(parameters(single()), groups=4, group_size=3), recorded)
    assert tailrace_here("trace", "sample", str(recorded), "--output", str(output), *AMOUNTS).returncode == 0
    known = set(read_trace(recorded).samples["response_tokens"])
    assert set(read_trace(output).samples["response_tokens"]) <= known
    done = tailrace_here("trace", "sample", str(recorded), "--output", str(recorded), "--force")
    assert "is an input of this command; give another file" in done.stderr


def test_what_cannot_be_drawn_leaves_nothing(tailrace_here: Command, tmp_path: Path) -> None:
    output = tmp_path / "o.parquet"
    done = tailrace_here("trace", "sample", "math32b", "--output", str(output))
    assert (done.returncode, done.stderr.count("\n"), output.exists()) == (2, 1, False)
    assert "workload 'math32b' is none of code-14b, " in done.stderr
    assert "did you mean 'math-32b'?" in done.stderr


def test_the_list_has_every_workload_that_ships(tailrace_here: Command) -> None:
    listed = tailrace_here("trace", "workloads").stdout
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    for name in library():
        assert f"\n{name} " in listed
        assert f"| `{name}` |" in page
