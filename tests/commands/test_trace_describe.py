"""`tailrace trace describe` prints traces side by side."""

import json
from pathlib import Path

import pytest

from tests.conftest import Command

ROWS = (
    '{"group": 0, "prompt_len": 10, "out_lens": [10, 20, 30]}\n'
    '{"group": 1, "prompt_len": 20, "out_lens": [40, 50, 1200]}\n'
)


@pytest.fixture
def traces(tmp_path: Path, tailrace_here: Command) -> list[str]:
    (tmp_path / "groups.jsonl").write_text(ROWS)
    names = [str(tmp_path / name) for name in ("one.parquet", "two.jsonl")]
    for name in names:
        assert tailrace_here("trace", "import", str(tmp_path / "groups.jsonl"), "--output", name).returncode == 0
    return names


def test_figures_stand_side_by_side(tailrace_here: Command, traces: list[str]) -> None:
    done = tailrace_here("trace", "describe", *traces)
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    shown = {line[0]: [part.strip() for part in line[1:] if part.strip()] for line in lines}
    assert shown["samples"] == ["6", "6"]
    assert shown["response tokens, most"] == ["1,200", "1,200"]
    assert shown["response tokens, mean"] == ["225", "225"]
    assert "turns, mean" not in shown


def test_a_figure_stays_on_one_line(tailrace_here: Command, traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "variance of log-length that the prompt explains"
    monkeypatch.setenv("COLUMNS", "80")
    piped = tailrace_here("trace", "describe", *traces * 5).stdout.splitlines()
    [line] = [line for line in piped if line.startswith(name)]
    assert line.count(" %") == 10
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = tailrace_here("trace", "describe", *traces).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    assert sum(line.startswith(name) for line in shown) == 1


def test_json_has_every_figure(tailrace_here: Command, traces: list[str]) -> None:
    [one, two] = json.loads(tailrace_here("trace", "describe", *traces, "--json").stdout)
    assert one == two
    assert one["response_tokens"]["percentiles"]["50"] == 35.0
    assert one["steps"][0]["step"] == 0
    assert one["turns"] is None


def test_what_is_no_trace_is_named(tailrace_here: Command, tmp_path: Path) -> None:
    done = tailrace_here("trace", "describe", str(tmp_path / "nothing.parquet"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "nothing.parquet does not exist" in done.stderr


def test_a_page_is_written_beside_the_table(tailrace_here: Command, traces: list[str], tmp_path: Path) -> None:
    done = tailrace_here("trace", "describe", *traces, "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0
    assert "samples" in done.stdout
    assert done.stdout.endswith(f"\n{tmp_path / 'page.html'}: a page of 2 traces\n")
    page = (tmp_path / "page.html").read_text()
    assert "<h1>one, two</h1>" in page
    assert '<div class="chart" id="workload-responses"' in page


def test_a_page_is_replaced_only_by_force_and_never_a_trace(
    tailrace_here: Command, traces: list[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    done = tailrace_here("trace", "describe", *traces, "--html", str(page))
    assert (done.returncode, page.read_text()) == (2, "mine")
    assert f"--html {page} exists; give another file, or replace it with --force" in done.stderr
    before = Path(traces[0]).read_bytes()
    done = tailrace_here("trace", "describe", *traces, "--html", traces[0], "--force")
    assert (done.returncode, Path(traces[0]).read_bytes()) == (2, before)
    assert f"--html {traces[0]} is an input of this command" in done.stderr
    assert tailrace_here("trace", "describe", traces[0], "--html", str(page), "--force").returncode == 0
    assert page.read_text().startswith("<!doctype html>")


def test_traces_of_one_name_are_told_apart(tailrace_here: Command, traces: list[str], tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "workload.parquet").write_bytes(Path(traces[0]).read_bytes())
    runs = [str(tmp_path / run / "workload.parquet") for run in ("a", "b")]
    assert tailrace_here("trace", "describe", *runs).stdout.split()[:2] == ["a/workload", "b/workload"]
    twice = tailrace_here("trace", "describe", runs[0], runs[0]).stdout.split("\n")[0]
    assert [name.strip() for name in twice.split("  ")[-2:]] == ["a/workload (1)", "a/workload (2)"]


def test_a_group_of_one_sample_says_why_a_figure_is_missing(tailrace_here: Command, tmp_path: Path) -> None:
    (tmp_path / "single.jsonl").write_text('{"group": 0, "prompt_len": 10, "out_lens": [10]}\n')
    trace = str(tmp_path / "single.parquet")
    assert tailrace_here("trace", "import", str(tmp_path / "single.jsonl"), "--output", trace).returncode == 0
    assert "one sample a group" in tailrace_here("trace", "describe", trace).stdout
