"""Time in which a server does not run counts as no client's silence."""

from tailrace.transfer.wire.clock import LONGEST_STEP_S, RunningClock


def test_it_goes_on_while_somebody_looks_and_a_stop_is_a_step() -> None:
    now = 5.0
    clock = RunningClock(lambda: now)
    start = clock()
    for _ in range(4):
        now += LONGEST_STEP_S
        clock()
    assert clock() == start + 4 * LONGEST_STEP_S
    now += 3600.0
    assert clock() == start + 5 * LONGEST_STEP_S
    now += 0.5
    assert clock() == start + 5 * LONGEST_STEP_S + 0.5
