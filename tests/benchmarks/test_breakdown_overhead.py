"""What the program counts as the cost of the breakdown."""

import pytest
from breakdown_overhead import ROUND, Measured, figures_of

from tailrace.activity import Activity
from tailrace.events import Event, EventLog
from tailrace.tasks.memory import MemoryUse


def test_the_cost_is_a_part_of_the_steps_that_have_the_breakdown() -> None:
    cpu_s = [2.0 if is_on else 1.0 for is_on in ROUND * 2]
    measured = Measured(wall_s=cpu_s, cpu_s=cpu_s, work_s={"MemoryUse.emit": 0.1, "Activity._emit": 0.1})
    figures = figures_of(measured)
    assert figures["breakdown_overhead_pct"] == 100 * 0.2 / 8
    assert figures["by_function_pct"] == {"MemoryUse.emit": 1.25, "Activity._emit": 1.25}
    assert figures["more_cpu_pct"] == 100


def test_a_function_counts_in_steps_with_the_breakdown_and_not_inside_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sink(_: Event) -> None:
        activity._broken_down({})  # one of the functions, inside of another

    measured, log = Measured(), EventLog(sinks=(sink,))
    activity = Activity(log, "engine", breakdown=True)
    monkeypatch.setattr(Activity, "_broken_down", measured.timed(Activity, "_broken_down"))
    monkeypatch.setattr(Activity, "_emit", measured.of_breakdown(Activity._emit))
    monkeypatch.setattr(MemoryUse, "emit", measured.timed(MemoryUse, "emit"))
    memory = MemoryUse(log, "engine", "cpu")
    memory.emit()
    activity.emit()
    assert measured.calls == {}
    measured.is_on = True
    memory.emit()
    assert measured.calls == {"MemoryUse.emit": 1}
    activity.emit()
    assert measured.calls == {
        "MemoryUse.emit": 1,
        "Activity._emit": 1,  # of the breakdown; the event of states is no part of it
        "Activity._broken_down": 2,  # that of the breakdown, and the sink's at the event of states
    }
    assert measured.work_s.keys() == measured.calls.keys()
