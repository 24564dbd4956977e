"""Silent processes, processes that died too often, and restarts that are due, by a clock that the test moves."""

import pytest

from tailrace.errors import QueueError
from tailrace.transfer.queue.processes.vitals import MAX_DEATHS, START_LIMIT_S, Vitals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vitals(clock: Clock) -> Vitals:
    return Vitals(clock)


def test_one_that_serves_is_silent_sooner_than_one_that_starts_and_is_named_once(vitals: Vitals, clock: Clock) -> None:
    for name in ("controller", "unit-0"):
        vitals.start(name)
    vitals.listen("controller")
    clock.now = 19.0
    assert vitals.silent() == {}
    clock.now = 21.0
    assert vitals.silent() == {"controller": 20.0}
    assert vitals.silent() == {}
    clock.now = START_LIMIT_S + 1.0
    vitals.hear("controller")
    assert vitals.silent() == {"unit-0": START_LIMIT_S}


def test_one_that_has_died_is_not_silent_and_is_due_at_once_or_after_a_pause(vitals: Vitals, clock: Clock) -> None:
    for name in ("controller", "unit-0"):
        vitals.start(name)
    vitals.listen("controller")
    assert vitals.die("unit-0", "it could not serve") == 2.0
    assert vitals.due == []
    assert vitals.die("controller", "it has served") == 0.0
    assert vitals.due == ["controller"]
    vitals.start("controller")
    assert vitals.listening == set(), "it has to say so again"
    clock.now = 1.5
    assert vitals.patience_s == 0.5
    clock.now = 2.0
    assert vitals.due == ["unit-0"]
    clock.now = 30.0
    assert vitals.silent() == {}, "one is dead, and the other has longer to start"


def test_too_many_deaths_within_the_time_are_an_error_and_old_ones_do_not_count(vitals: Vitals, clock: Clock) -> None:
    for number in range(2 * MAX_DEATHS):
        clock.now = 200.0 * number
        vitals.start("unit-0")
        vitals.die("unit-0", "it ended")
    vitals.start("unit-0")
    vitals.die("unit-0", "it ended")
    vitals.start("unit-0")
    with pytest.raises(QueueError, match=r"^it ended; with it, 6 of its processes have within 600 s: given up$"):
        vitals.die("unit-0", "it ended")


def test_a_start_is_late_by_the_time_since_the_first_process_was_started(vitals: Vitals, clock: Clock) -> None:
    clock.now = 1000.0
    assert not vitals.is_late
    vitals.start("controller")
    clock.now += START_LIMIT_S - 1.0
    vitals.start("controller")
    assert not vitals.is_late
    clock.now += 2.0
    assert vitals.is_late
