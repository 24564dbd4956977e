"""Events reach the sinks with times on the run's clock, are written line by line, and are read back whole."""

import resource
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tailrace.errors import UserError
from tailrace.events import Event, EventFile, EventLog, read_events

RUN = Event(task="run", actor="driver", start=0.0, end=0.0)


def test_events_read_back_as_written(tmp_path: Path) -> None:
    seen: list[Event] = []
    file = EventFile(tmp_path / "events.jsonl")
    log = EventLog(sinks=(file, seen.append), offset=100.0)
    with log.span("actor", "trainer", step=3) as span:
        span.tokens = 7
    file.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert [event] == seen
    assert (event.task, event.step, event.tokens, event.worker) == ("actor", 3, 7, "")
    assert event.end >= event.start >= 100.0


def test_metrics_are_plain_finite_floats_whatever_was_counted_with(log: EventLog, events: list[Event]) -> None:
    counted = {"loss": np.mean([1.0, 2.0]), "lr": np.float32(0.5), "rows": np.int64(3), "kl": np.float64("nan"), "n": 1}
    with log.span("actor", "trainer", metrics=counted):
        pass
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events[0]), type=Event).metrics == {
        "loss": 1.5,
        "lr": 0.5,
        "rows": 3.0,
        "n": 1.0,
    }


def test_work_that_raises_leaves_no_event(log: EventLog, events: list[Event]) -> None:
    with pytest.raises(ArithmeticError), log.span("actor", "trainer"):
        raise ArithmeticError
    assert events == []


def test_a_last_line_cut_short_is_left_out_and_a_broken_one_before_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    file(RUN)
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"task":"st')
    assert len(read_events(path)) == 1
    path.write_bytes(b"junk\n" + whole)
    with pytest.raises(UserError, match="line 1, is not an event"):
        read_events(path)


def test_a_file_with_a_last_line_cut_short_goes_on_after_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(msgspec.json.encode(RUN) + b'\n{"task":"st')
    file = EventFile(path)
    file(RUN)
    file.close()
    assert read_events(path) == [RUN, RUN]


def test_what_is_no_file_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_events(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} cannot be written: Is a directory"):
        EventFile(tmp_path)


def test_a_file_that_cannot_be_written_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(UserError, match=r"events\.jsonl cannot be written: File too large; .* --resume"):
            file(RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()


def test_a_missing_file_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the directory of a run"):
        read_events(tmp_path / "events.jsonl")


def test_the_log_of_a_worker_has_the_clock_of_the_run() -> None:
    driver = EventLog(sinks=(), offset=1000.0)
    worker = EventLog(sinks=(), worker="rollout-0", origin=driver.origin)
    before, between, after = driver.now(), worker.now(), driver.now()
    assert before - 1.0 < between < after + 1.0  # as far as the system's two clocks agree
    assert before >= 1000.0


def test_a_clock_that_is_set_tears_no_span(monkeypatch: pytest.MonkeyPatch, log: EventLog, events: list[Event]) -> None:
    with log.span("actor", "trainer"):
        monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0.0 <= events[0].start <= events[0].end < 1e6


def test_a_moment_of_the_performance_counter_is_one_of_the_run(log: EventLog) -> None:
    before, moment, after = log.now(), log.at(time.perf_counter()), log.now()
    assert before <= moment <= after


def test_what_a_worker_emits_arrives_at_the_run_as_it_was(log: EventLog, events: list[Event]) -> None:
    outbox: list[Event] = []
    worker = EventLog(sinks=(outbox.append,), worker="rollout-0", origin=log.origin)
    with worker.span("rollout", "rollout", step=1):
        pass
    (sent,) = outbox
    assert sent.worker == "rollout-0"
    log.forward(msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Event))
    assert events == [sent]


def test_the_events_of_another_worker_keep_its_name(events: list[Event]) -> None:
    log = EventLog(sinks=(events.append,), worker="trainer")
    log.emit(Event(task="worker_died", actor="driver", start=0.0, end=0.0, worker="rollout-0"))
    log.emit(Event(task="optimizer", actor="trainer", start=0.0, end=0.0))
    assert [event.worker for event in events] == ["rollout-0", "trainer"]
