"""Laps are added up by part, and taken once."""

import threading

import pytest

from tailrace.host import stopwatch
from tailrace.host.stopwatch import Stopwatch


class Clock:
    """A stand-in for the module `time`, whose time a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_a_lap_is_the_time_since_the_one_before(clock: Clock) -> None:
    watch = Stopwatch()
    watch.start()
    for now, part in ((2.0, "forward"), (5.0, "backward"), (6.0, "forward")):
        clock.now = now
        watch.lap(part)
    assert watch.take() == {"forward": 3.0, "backward": 3.0}


def test_what_was_taken_is_not_taken_again(clock: Clock) -> None:
    watch = Stopwatch()
    watch.add("decode", 2.0)
    watch.take()
    watch.add("prefill", 1.0)
    assert watch.take() == {"prefill": 1.0}
    assert watch.take() == {}


def test_no_time_is_lost_to_a_thread_that_takes_meanwhile() -> None:
    watch, taken, measured = Stopwatch(), 0.0, 20_000

    def measure() -> None:
        for _ in range(measured):
            watch.add("decode", 1.0)

    thread = threading.Thread(target=measure)
    thread.start()
    while thread.is_alive():
        taken += watch.take().get("decode", 0.0)
    assert taken + watch.take().get("decode", 0.0) == measured
