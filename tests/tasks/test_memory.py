"""The events of a worker's memory: what its parts hold, and the rest."""

from collections.abc import Iterator

import pytest

from tailrace.events import Event, EventLog
from tailrace.tasks import memory
from tailrace.tasks.memory import MemoryUse


class Process:
    """A stand-in for the memory of this process."""

    def __init__(self) -> None:
        self.shares: Iterator[int | None] = iter([90, None])

    def resident(self) -> int:
        return 100

    def shared_out(self) -> int | None:
        return next(self.shares)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    monkeypatch.setattr(memory, "ProcessMemory", Process)
    return []


def use(events: list[Event], device: str = "cpu") -> MemoryUse:
    return MemoryUse(EventLog(sinks=(events.append,)), "trainer", device)


def test_on_a_cpu_the_whole_is_what_is_resident(events: list[Event]) -> None:
    told = use(events)
    told.add(lambda: {"weights": 30, "gradients": 5})
    told.add(lambda: {"weights": 20, "kv_cache_free": 10})
    told.emit()
    told.emit()
    held = {"weights": 50, "gradients": 5, "kv_cache_free": 10, "other": 35, "peak": 100, "resident": 100}
    assert [event.metrics for event in events] == [held | {"host": 90}, held]


def test_on_a_gpu_the_whole_is_the_peak_of_its_allocator(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "take_peak", lambda device: 80 if device == "cuda:1" else None)
    told = use(events, "cuda:1")
    told.add(lambda: {"weights": 50})
    told.emit()
    assert events[0].metrics == {"weights": 50, "activations": 30, "peak": 80, "resident": 100, "host": 90}


def test_parts_in_other_processes_than_the_allocator_sees_are_the_whole(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "take_peak", lambda _: 10)
    told = use(events, "cuda")
    told.add(lambda: {"weights": 50})
    told.emit()
    assert events[0].metrics == {"weights": 50, "activations": 0, "peak": 50, "resident": 100, "host": 90}
