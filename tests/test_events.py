"""Events are written a line at a time and read back whole."""

from pathlib import Path

import pytest

from tailrace.errors import UserError
from tailrace.events import Event, EventLog, read_events


def test_events_read_back_as_written(tmp_path: Path) -> None:
    seen: list[Event] = []
    log = EventLog(tmp_path / "events.jsonl", sinks=(seen.append,), offset=100.0)
    with log.span("actor", "trainer", step=3) as span:
        span.tokens = 7
    log.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert [event] == seen
    assert (event.task, event.step, event.tokens) == ("actor", 3, 7)
    assert event.end >= event.start >= 100.0


def test_work_that_raises_leaves_no_event(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ArithmeticError), log.span("actor", "trainer"):
        raise ArithmeticError
    log.close()
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_last_line_cut_short_is_left_out_and_a_broken_one_before_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit(Event(task="run", actor="driver", start=0.0, end=0.0))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"task":"st')
    assert len(read_events(path)) == 1
    path.write_bytes(b"junk\n" + whole)
    with pytest.raises(UserError, match="line 1, is not an event"):
        read_events(path)


def test_a_missing_file_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the directory of a run"):
        read_events(tmp_path / "events.jsonl")
