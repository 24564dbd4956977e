"""The seconds of a worker's states, and of its phases, add up to the time that passed, whatever overlaps."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tailrace.activity import Activity, TimedExecutor
from tailrace.events import Event, EventLog
from tailrace.registers.phases import PHASES, STATES, Phase, State, Wait, Work
from tailrace.report.breakdown import breakdown_of


class FakeLog(EventLog):
    """An event log whose clock a test moves."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.time = 0.0
        super().__init__(sinks=(self.events.append,))

    def now(self) -> float:
        return self.time


def seconds(log: FakeLog, activity: Activity) -> dict[str, float]:
    activity.emit()
    return log.events[-1].metrics


def states(**values: float) -> dict[str, float]:
    return {state: values.get(state, 0.0) for state in STATES}


@pytest.fixture
def log() -> FakeLog:
    return FakeLog()


@pytest.fixture
def activity(log: FakeLog) -> Activity:
    return Activity(log, "rollout")


class Overlapping(RuleBasedStateMachine):
    """Compare with a model that asks at each second which state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.log = FakeLog()
        self.activity = Activity(self.log, "rollout")
        self.open: list[tuple[State, AbstractContextManager[None]]] = []
        self.expected = states()
        self.since = 0.0

    @rule(state=st.sampled_from(["busy", "data", "weights"]))
    def begin(self, state: State) -> None:
        if state == "data" or state == "weights":
            block: AbstractContextManager[None] = self.activity.waiting(state)
        else:
            block = self.activity.busy()
        block.__enter__()
        self.open.append((state, block))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.open:
            _, block = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            block.__exit__(None, None, None)

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.log.time += seconds
        held = {state for state, _ in self.open}
        self.expected[next((state for state in STATES if state in held), "idle")] += seconds

    @rule()
    def emit(self) -> None:
        self.activity.emit()
        event = self.log.events[-1]
        assert event.metrics == self.expected
        assert (event.task, event.actor, event.start, event.end) == ("activity", "rollout", self.since, self.log.time)
        self.expected, self.since = states(), self.log.time

    @invariant()
    def spans_follow_each_other_and_are_accounted_for(self) -> None:
        at = 0.0
        for event in self.log.events:
            assert event.start == at
            assert sum(event.metrics.values()) == event.end - event.start
            at = event.end


TestOverlapping = Overlapping.TestCase


class OverlappingPhases(RuleBasedStateMachine):
    """Compare with a model that asks at each second which phase holds."""

    def __init__(self) -> None:
        super().__init__()
        self.log = FakeLog()
        self.activity = Activity(self.log, "trainer", breakdown=True)
        self.open: list[tuple[Phase, AbstractContextManager[None]]] = []
        self.expected: dict[str, float] = {}

    @rule(phase=st.sampled_from([*get_args(Work), *get_args(Wait)]))
    def begin(self, phase: Phase) -> None:
        if phase == "data" or phase == "weights" or phase == "tools":
            block: AbstractContextManager[None] = self.activity.waiting(phase)
        else:
            assert phase != "idle"
            block = self.activity.busy(phase)
        block.__enter__()
        self.open.append((phase, block))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.open:
            _, block = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            block.__exit__(None, None, None)

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.log.time += seconds
        held = {phase for phase, _ in self.open}
        phase = next((phase for phase in PHASES if phase in held), "idle")
        self.expected[phase] = self.expected.get(phase, 0.0) + seconds

    @rule()
    def emit(self) -> None:
        self.activity.emit()
        told, states = self.log.events[-2:]
        assert (told.task, told.metrics) == ("breakdown", self.expected)
        assert (told.start, told.end) == (states.start, states.end)
        assert sum(told.metrics.values()) == told.end - told.start == sum(states.metrics.values())
        self.expected = {}

    @invariant()
    def the_shares_of_all_time_add_up_to_one(self) -> None:
        whole = [Event(task="step", actor="driver", start=0.0, end=self.log.time + 1)]
        for worker in breakdown_of(self.log.events, whole):
            assert sum(map(worker.share, PHASES)) == pytest.approx(1)


TestOverlappingPhases = OverlappingPhases.TestCase


def test_work_that_raises_ends_its_state(log: FakeLog, activity: Activity) -> None:
    def work() -> None:
        log.time += 1
        raise ArithmeticError

    with pytest.raises(ArithmeticError), activity.busy():
        work()
    log.time += 2
    assert seconds(log, activity) == states(busy=1.0, idle=2.0)


async def test_a_wait_that_is_cancelled_ends_its_state(log: FakeLog, activity: Activity) -> None:
    started = asyncio.Event()

    async def wait() -> None:
        with activity.waiting("data"):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await started.wait()
    log.time += 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    log.time += 1
    assert seconds(log, activity) == states(data=3.0, idle=1.0)


def test_threads_that_change_at_once_leave_every_state(log: FakeLog, activity: Activity) -> None:
    def work() -> None:
        for _ in range(300):
            with activity.busy(), activity.waiting("weights"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.time += 1
    assert seconds(log, activity) == states(idle=1.0)


def test_the_work_of_a_device_is_busy_and_waiting_for_it_is_not(log: FakeLog, activity: Activity) -> None:
    def work(seconds: int, *, factor: int) -> int:
        log.time += seconds
        return seconds * factor

    with ThreadPoolExecutor(1) as device, TimedExecutor(device, activity) as executor:
        assert executor.submit(work, 3, factor=2).result(timeout=10) == 6
        log.time += 1
        assert seconds(log, activity) == states(busy=3.0, idle=1.0)


async def test_a_device_that_waits_for_rows_while_it_works_is_busy(log: FakeLog, activity: Activity) -> None:
    def work() -> None:
        log.time += 2

    with ThreadPoolExecutor(1) as device, TimedExecutor(device, activity) as executor, activity.waiting("data"):
        await asyncio.get_running_loop().run_in_executor(executor, work)
        log.time += 5
    assert seconds(log, activity) == states(busy=2.0, data=5.0)


def test_an_error_of_the_devices_work_reaches_its_caller(activity: Activity) -> None:
    def work() -> None:
        raise ArithmeticError("odd")

    with ThreadPoolExecutor(1) as device, pytest.raises(ArithmeticError, match="odd"):
        TimedExecutor(device, activity).submit(work).result(timeout=10)


def test_work_on_a_device_counts_as_the_phase_of_its_executor(log: FakeLog) -> None:
    activity = Activity(log, "trainer", breakdown=True)

    def work(seconds: int) -> None:
        log.time += seconds

    with ThreadPoolExecutor(1) as device, TimedExecutor(device, activity) as executor:
        executor.during("update").submit(work, 3).result(timeout=10)
        with activity.busy("weight_transfer"):
            executor.during("generation").submit(work, 2).result(timeout=10)
        executor.submit(work, 1).result(timeout=10)
    activity.emit()
    assert log.events[-2].metrics == {"weight_transfer": 2.0, "update": 3.0, "other": 1.0}
    assert log.events[-1].metrics == states(busy=6.0)


def test_parts_of_a_phase_stand_beside_it_and_those_of_two_models_are_added(log: FakeLog) -> None:
    activity = Activity(log, "trainer", breakdown=True)
    for told in ({"forward": 1.0, "backward": 2.0}, {"forward": 0.5}, {}):
        activity.divide("update", lambda told=told: told)  # type: ignore[misc]
    with activity.busy("update"):
        log.time += 4
    activity.emit()
    assert log.events[-2].metrics == {"update": 4.0, "update/forward": 1.5, "update/backward": 2.0}


def test_without_the_breakdown_only_the_states_are_told(log: FakeLog, activity: Activity) -> None:
    activity.divide("update", lambda: pytest.fail("nobody reads the parts"))
    activity.emit()
    assert [event.task for event in log.events] == ["activity"]
