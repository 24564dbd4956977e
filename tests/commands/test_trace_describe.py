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
