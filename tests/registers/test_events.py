"""One entry in the register makes a kind of event known to all that shows events."""

import ast
import io
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from rich.console import Console

from tailrace.events import Event
from tailrace.registers.events import ABOUT, About, EventKind
from tailrace.registers.prometheus import Series
from tailrace.report.display import Display
from tailrace.report.progress import Progress
from tailrace.report.prometheus import PrometheusSink
from tailrace.report.run_data import RunData
from tailrace.report.sinks import tagged_scalars
from tailrace.report.timeline import timeline
from tailrace.report.trace import trace_events
from tests.report.synthetic_workers import separated_run

PACKAGE = Path(__file__).parents[2] / "tailrace"
FLUSH = About(
    meaning="An engine empties its cache.",
    colour="#123456",
    phase="filling the cache",
    tells="why",
    scalars="train",
    series=Series(name="tailrace_flushes", type="counter", help="Times that a cache was emptied.", labels=("worker",)),
)
ALARM = About(meaning="An engine is too hot.", is_work=False, mark="worker", row="worker", is_urgent=True, tells="text")


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add two kinds of events whose only trace in the code is their entry."""
    monkeypatch.setitem(ABOUT, "cache_flush", FLUSH)
    monkeypatch.setitem(ABOUT, "heat_alarm", ALARM)


def flush(at: float = 20.0) -> Event:
    return Event(
        task="cache_flush",
        actor="engine",
        start=at,
        end=at + 1.5,
        step=2,
        worker="rollout-0",
        metrics={"blocks": 7.0},
        info={"why": "new weights"},
    )


def alarm(at: float = 30.0) -> Event:
    return Event(task="heat_alarm", actor="rollout-0", start=at, end=at, info={"text": "95 degrees"})


def drawn() -> dict[str, Any]:
    events = sorted([*separated_run(), flush(), alarm()], key=lambda event: event.end)
    shown = timeline(RunData(name="run", events=events, last_event_at=datetime.now(UTC)))
    assert shown is not None
    return shown


def test_a_new_kind_has_bars_of_its_colour_in_the_timeline() -> None:
    (track,) = [track for track in drawn()["tracks"] if track["task"] == "cache_flush"]
    assert (track["name"], track["colour"], track["seconds"]) == ("cache flush", "#123456", [1.5])


def test_a_new_kind_of_mark_stands_at_its_worker() -> None:
    shown = drawn()
    (mark,) = [mark for mark in shown["marks"] if mark["name"] == "heat alarm"]
    assert mark["time"] == 30.0
    assert mark["y"] == next(row["middle"] for row in shown["rows"] if row["name"].startswith("rollout-0"))
    assert "heat_alarm" not in {track["task"] for track in shown["tracks"]}


def test_perfetto_has_its_spans_and_marks() -> None:
    traced = trace_events([flush(), alarm()])
    assert [event["dur"] for event in traced if event["name"] == "cache_flush 3"] == [1_500_000]
    assert [event["s"] for event in traced if event["name"] == "heat alarm"] == ["p"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_has_its_line_and_a_terminal_only_an_urgent_one(terminal: bool) -> None:
    output = io.StringIO()
    with Display(Console(file=output, force_terminal=terminal, force_interactive=terminal)) as display:
        display(flush())
        display(alarm())
    assert "heat alarm · 95 degrees" in output.getvalue()
    assert ("cache flush · new weights" in output.getvalue()) is not terminal


def test_the_display_says_what_follows_it() -> None:
    progress = Progress()
    progress.add(flush(), at=0.0)
    assert progress.phase == "filling the cache"


def test_tensorboard_and_wandb_have_its_metrics() -> None:
    assert tagged_scalars(flush()) == {"train/blocks": 7.0}


def test_prometheus_counts_it_for_each_worker() -> None:
    with closing(PrometheusSink(0)) as sink:
        sink(flush())
        sink(flush())
        with urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=30) as answer:
            assert 'tailrace_flushes_total{worker="rollout-0"} 2.0' in answer.read().decode()


def test_the_values_of_old_event_files_stay() -> None:
    written = """run end step evaluation rollout sample reward reference advantage actor optimizer update_weights
        weights_publish weights_transfer weights_wait weights_drain checkpoint export samples warning worker_started
        worker_died activity queue adaptive_tp"""
    assert {str(kind) for kind in EventKind} >= set(written.split())


def literals() -> Iterator[str]:
    """Yield the places where the package emits or compares a kind by a literal."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="Event"), keywords=keywords):
                    names = [keyword.value for keyword in keywords if keyword.arg == "task"]
                case ast.Call(func=ast.Attribute(attr="span"), args=[name, *_]):
                    names = [name]
                case ast.Compare(left=ast.Attribute(value=ast.Name(id="event"), attr="task"), comparators=names):
                    pass
                case _:
                    continue
            for name in names:
                values = name.elts if isinstance(name, ast.Tuple | ast.Set) else [name]
                if any(isinstance(value, ast.Constant) for value in values):
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_who_emits_or_reads_a_kind_names_its_entry() -> None:
    assert list(literals()) == []
