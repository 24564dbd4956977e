"""The figures of the workers in the events of steps."""

import pytest

from tailrace.events import Event
from tailrace.run.worker_metrics import WorkerMetrics


def told(task: str, worker: str = "", **metrics: float) -> Event:
    metrics = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Event(task=task, actor="engine", start=0.0, end=1.0, metrics=metrics, worker=worker)


def test_a_step_has_the_shares_and_the_peaks_since_the_one_before() -> None:
    sink = WorkerMetrics()
    first, second = (Event(task="step", actor="driver", start=0.0, end=1.0, metrics={"loss": 1.0}) for _ in range(2))
    for event in (
        told("breakdown", generation=1.0, generation__decode=0.5),
        told("breakdown", generation=0.5, idle=0.5),
        told("breakdown", "trainer", update=2.0),
        told("memory", "trainer", peak=3.0),
        told("memory", "trainer", peak=2.0),
        first,
        told("breakdown", idle=1.0),
        second,
    ):
        sink(event)
    assert first.metrics == {
        "loss": 1.0,
        "share/engine/generation": pytest.approx(0.75),
        "share/engine/idle": pytest.approx(0.25),
        "share/trainer/update": 1.0,
        "memory/trainer": 3.0,
    }
    assert second.metrics == {"loss": 1.0, "share/engine/idle": 1.0}
