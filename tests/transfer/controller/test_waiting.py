from hypothesis import given
from hypothesis import strategies as st

from tailrace.transfer.queue.controller.waiting import Timer, Timers


def test_what_is_due_is_done_in_the_order_of_the_times_and_once() -> None:
    timers, done = Timers(), list[str]()
    timers.at(2.0, lambda: done.append("second"))
    timers.at(1.0, lambda: done.append("first"))
    timers.at(1.0, lambda: done.append("first, later"))
    timers.at(3.0, lambda: done.append("too late"))
    cancelled = timers.at(1.5, lambda: done.append("cancelled"))
    cancelled.cancel()
    cancelled.cancel()
    timers.run(2.0)
    timers.run(2.0)
    assert done == ["first", "first, later", "second"]
    assert timers.next == 3.0


def test_what_is_done_may_set_and_cancel_timers() -> None:
    timers, done = Timers(), list[int]()
    other = timers.at(1.0, lambda: done.append(2))

    def first() -> None:
        other.cancel()
        timers.at(1.0, lambda: done.append(3))

    timers.at(0.5, first)
    timers.run(1.0)
    assert done == [3]
    assert timers.next is None


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=400))
def test_cancelled_ones_are_not_kept_for_long(entries: list[tuple[int, bool]]) -> None:
    timers, done, kept = Timers(), list[int](), list[Timer]()
    for when, is_cancelled in entries:
        timer = timers.at(float(when), lambda when=when: done.append(when))  # type: ignore[misc]
        if is_cancelled:
            timer.cancel()
        else:
            kept.append(timer)
        assert len(timers) <= max(2 * len(kept), len(kept) + 65)
    timers.run(50.0)
    assert done == sorted(when for when, is_cancelled in entries if not is_cancelled)
    assert len(timers) == 0
