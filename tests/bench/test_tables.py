"""The tables of a benchmark, of figures that are known."""

import pytest

from tailrace.bench.compare import comparisons
from tailrace.bench.tables import print_comparison, print_result
from tests.helpers.bench import result

Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def rows(printed: Printed) -> list[list[str]]:
    return [line.split() for line in printed.readouterr().out.splitlines() if line.strip()]


def test_a_result_is_told_as_a_whole_by_step_by_worker_and_by_phase(capsys: Printed) -> None:
    print_result(result(2.0))
    first, *table = rows(capsys)
    assert " ".join(first) == "a: 4 samples, 5,678 response tokens, 2 responses cut off at 2,048; warm-up: 1 step"
    assert ["seconds", "a", "step", "2"] in table
    assert ["response", "tokens", "a", "second", "50"] in table
    assert ["step", "seconds", "generation", "update", "tokens", "tail"] in table, "of the stages that were at work"
    assert ["2", "2", "1", "1", "1,234", "25.0", "%"] in table, "steps are counted from 1"
    assert ["engine", "75.0", "%", "25.0", "%", "0.0", "%", "0.0", "%", "1.50", "GiB"] in table
    assert ["driver"] in table
    assert ["decode", "50.0", "%"] in table
    assert ["prefill", "25.0", "%"] in table
    assert ["engine", "waiting", "for", "tools", "20.0", "%"] in table
    assert not any("reward" in row for row in table), "a phase below a percent is left out"


def test_what_no_event_tells_has_no_row(capsys: Printed) -> None:
    print_result(result(2.0, updates=None))
    assert "of updates" not in capsys.readouterr().out


def test_two_configurations_stand_side_by_side_with_their_ratio(capsys: Printed) -> None:
    pairs = [(result(1.0), result(2.0)), (result(2.0), result(4.0))]
    print_comparison(comparisons(pairs), ("", "pipeline.streaming=true"))
    a, b, headings, first, *others = rows(capsys)
    assert (a, b) == (["A:", "as", "given"], ["B:", "pipeline.streaming=true"])
    assert headings == ["A", "B", "B", "/", "A", "95", "%", "interval"]
    assert not any("interval" in row for row in others)
    assert first == ["seconds", "a", "step", "1.5", "3", "2.000", "2.000", "to", "2.000"]


def test_a_single_pair_has_no_interval(capsys: Printed) -> None:
    print_comparison(comparisons([(result(1.0), result(2.0))]), ("", ""))
    _, _, _, first, *_, last = rows(capsys)
    assert first == ["seconds", "a", "step", "1", "2", "2.000"]
    assert " ".join(last) == "An interval takes two rounds or more."
