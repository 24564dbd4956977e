"""Runs with workers: their settings, what is done to them, and how they are compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.cluster.base import WorkerSpec
from tailrace.events import Event, EventLog, read_events

KL: dict[str, Any] = {"algorithm__kl": {"coefficient": 0.01}}
SYNCHRONOUS: dict[str, Any] = {"placement": "separated"}
FULLY_ASYNCHRONOUS: dict[str, Any] = {"placement": "separated", "max_staleness": 1, "streaming": True}


def at_events(monkeypatch: pytest.MonkeyPatch, deeds: dict[str, Callable[[dict[str, int]], None]]) -> None:
    """Do each deed at the first event that its name `task step` describes. It gets the newest pid of each worker."""
    pids: dict[str, int] = {}

    class Watched(EventLog):
        def forward(self, event: Event) -> None:
            super().forward(event)
            if event.task == "worker_started":
                pids[event.actor] = event.info["pid"]
            if deed := deeds.pop(f"{event.task} {event.step}", None):
                deed(pids)

    monkeypatch.setattr("tailrace.run.log.EventLog", Watched)


def of(run: Path, task: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event.task == task]


def hold_trainer(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Let the trainer stand still at `moment`; see tests/helpers/held_trainer.py."""

    def spec(**values: Any) -> WorkerSpec:
        held = {"factory": f"tests.helpers.held_trainer:{moment}"} if values["name"] == "trainer" else {}
        return WorkerSpec(**values | held)

    monkeypatch.setattr("tailrace.run.separated.WorkerSpec", spec)
