"""A run whose queue loses processes: `python -m tests.helpers.killed_run CONFIG KILLS`, with both as JSON.

KILLS names processes by moments: {"sample 1": ["unit-0"]} kills unit-0 when the first sample of step 1 is there. The
last line printed is a JSON list: for each step, the rows that it trained on, by `order`.
"""

import json
import os
import signal
import sys
from typing import Any
from unittest.mock import patch

from tailrace.config.load import load_config
from tailrace.events import Event, EventLog
from tailrace.run.step_metrics import step_metrics
from tailrace.run.train import train
from tailrace.tasks.actor import StepResult
from tailrace.transfer.queue.processes.supervisor import QueueProcesses

queues: list[QueueProcesses] = []
trained: list[list[int]] = []


class Known(QueueProcesses):
    """A supervisor that is added to `queues`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        queues.append(self)


class Killer(EventLog):
    """An event log that kills processes at events."""

    kills: dict[str, list[str]]

    def emit(self, event: Event) -> None:
        for name in self.kills.pop(f"{event.task} {event.step}", ()):
            os.kill(queues[0].pids[name], signal.SIGKILL)
        super().emit(event)


def main() -> int:
    config, kills = map(json.loads, sys.argv[1:])
    Killer.kills = kills

    def recorded(result: StepResult, step: int, seconds: float) -> dict[str, float]:
        trained.append([row.order for row in result.rows])
        return step_metrics(result, step, seconds)

    with (
        patch("tailrace.run.queue.queue_processes", Known),
        patch("tailrace.run.log.EventLog", Killer),
        patch("tailrace.run.learner.step_metrics", recorded),
    ):
        code = train(load_config(config), resume=False)
    assert not Killer.kills, f"these moments never came: {Killer.kills}"
    print(json.dumps(trained))
    return code


if __name__ == "__main__":
    sys.exit(main())
