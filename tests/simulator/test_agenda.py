"""Claims on the order in which things happen in simulated time."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tailrace.simulator.agenda import Agenda, Change, Process, Turns


def test_what_has_one_time_happens_in_the_order_of_its_entry() -> None:
    agenda, seen = Agenda(), []
    for name, time in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        agenda.at(time, lambda name=name: seen.append((name, agenda.now)))  # type: ignore[misc]
    agenda.run()
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_what_is_cancelled_does_not_happen() -> None:
    agenda, seen = Agenda(), []
    entry = agenda.after(1.0, lambda: seen.append("cancelled"))
    agenda.after(0.5, entry.cancel)
    agenda.run()
    assert (seen, agenda.now) == ([], 0.5)


def test_a_process_works_and_waits() -> None:
    agenda, seen = Agenda(), []
    arrived = Change(agenda)

    def consumer() -> Process:
        yield arrived
        seen.append(agenda.now)
        yield 2.0
        seen.append(agenda.now)

    agenda.start(consumer())
    agenda.after(3.0, arrived.tell)
    agenda.run()
    assert seen == [3.0, 5.0]


def test_a_process_waits_for_whichever_comes_first() -> None:
    agenda, seen = Agenda(), []
    change = Change(agenda)

    def impatient() -> Process:
        for seconds in (1.0, 10.0, 1.0):
            yield seconds, change
            seen.append(agenda.now)

    agenda.start(impatient())
    agenda.after(4.0, change.tell)
    agenda.run()
    assert seen == [1.0, 4.0, 5.0]  # its time, the change, its time again


@given(st.lists(st.floats(0, 100), max_size=20), st.floats(0, 100))
def test_a_run_until_a_time_leaves_what_comes_later(times: list[float], until: float) -> None:
    agenda, seen = Agenda(), []
    for time in times:
        agenda.at(time, lambda: seen.append(agenda.now))
    agenda.run(until)
    assert seen == sorted(time for time in times if time <= until)
    agenda.run()
    assert seen == sorted(times)


def test_a_stopped_agenda_forgets_the_rest() -> None:
    agenda = Agenda()

    def ticks() -> Iterator[float]:
        while True:
            yield 1.0

    agenda.start(ticks())  # type: ignore[arg-type]
    agenda.at(5.5, agenda.stop)
    agenda.run()
    assert agenda.now == 5.5


def test_what_an_action_still_has_happen_does_not_once_it_has_stopped() -> None:
    agenda, seen = Agenda(), list[str]()

    def ends() -> None:
        agenda.stop()
        agenda.after(1.0, lambda: seen.append("later"))

    agenda.after(1.0, ends)
    agenda.run()
    assert not seen


def test_turns_are_taken_in_the_order_of_asking() -> None:
    """The first one asks again as it leaves, and waits for the others."""
    agenda, seen = Agenda(), list[tuple[str, float]]()
    turns = Turns(agenda)

    def worker(name: str, times: int) -> Process:
        for _ in range(times):
            yield from turns.take()
            seen.append((name, agenda.now))
            yield 1.0
            turns.leave()

    for name, times in (("a", 2), ("b", 1), ("c", 1)):
        agenda.start(worker(name, times))
    agenda.run()
    assert seen == [("a", 0.0), ("b", 1.0), ("c", 2.0), ("a", 3.0)]
