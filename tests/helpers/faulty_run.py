"""A separated run that loses processes at random moments: `python -m tests.helpers.faulty_run CONFIG SEED`.

CONFIG is a recipe as JSON. One process of each kind is killed or stopped at a seeded moment, an event that the driver
hears. If the process is not there then, it is harmed as soon as it is. `trained.jsonl` in the run's directory gets a
line for each step of the trainer.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tailrace.cluster.base import WorkerContext, WorkerSpec
from tailrace.cluster.local import LocalCluster, LocalHandle
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.events import Event, EventLog
from tailrace.run.step_metrics import step_metrics
from tailrace.run.train import train
from tailrace.run.workers.trainer import TrainerWorker
from tailrace.tasks.actor import StepResult
from tailrace.transfer.queue.processes.supervisor import QueueProcesses

WORKERS = (("rollout-0", "rollout-1"), ("reward-0",), ("reference-0",), ("trainer",))
"""The names of the workers of each kind."""
KINDS = (*WORKERS, ("controller",), ("unit-0", "unit-1"))
"""The names of the processes of each kind, the queue's included."""
_EVENTS = 150
"""The least number of events of a run of a few steps. Each fault comes with one of these."""


def recording(settings: bytes, context: WorkerContext) -> TrainerWorker:
    """Make the trainer worker, which records the `order` of the rows it has trained on."""
    worker = TrainerWorker(settings, context)
    record_rows(Path(worker.config.output_dir) / "trained.jsonl")
    return worker


def record_rows(path: Path) -> None:
    """Record the `order` of the rows that a learner of this process trains on, one line for each step."""

    def recorded(result: StepResult, step: int, seconds: float) -> dict[str, float]:
        with path.open("a") as file:
            file.write(json.dumps([step, sorted(row.order for row in result.rows)]) + "\n")
        return step_metrics(result, step, seconds)

    patch("tailrace.run.learner.step_metrics", recorded).start()


class Faults:
    """The events at which one process of each kind is harmed."""

    def __init__(self, seed: int, *, local: Sequence[LocalCluster] | None = None) -> None:
        """`local`: the clusters made so far, if workers are in this process. Such workers are killed, never stopped."""
        choose = random.Random(seed)
        moments = choose.sample(range(5, _EVENTS), len(KINDS))
        self.plan = {moment: choose.choice(kind) for moment, kind in zip(moments, KINDS, strict=True)}
        self._stops = {moment for moment in self.plan if choose.random() < 0.3}
        self._local = local
        self.done: list[str] = []
        """What was done, for people to read."""
        self.workers: dict[str, int] = {}
        """The pids of the living workers, as far as the driver has heard."""
        self._due: list[tuple[str, signal.Signals]] = []
        self.queues: list[QueueProcesses] = []
        self._events = 0
        self._killing: list[asyncio.Task[None]] = []

    def hear(self, event: Event) -> None:
        """Note a new process, and do what is due."""
        if event.task == "run":
            self.workers.clear()
        elif event.task == "worker_started":
            self.workers[event.actor] = event.info["pid"]
        elif event.task == "worker_died":
            self.workers.pop(event.actor, None)
        self._events += 1
        if victim := self.plan.pop(self._events, None):
            stopped = self._events in self._stops and _is_worker(victim)
            self._due.append((victim, signal.SIGSTOP if stopped else signal.SIGKILL))
        self._due = [(victim, how) for victim, how in self._due if not self._harm(victim, how)]

    def _harm(self, victim: str, how: signal.Signals) -> bool:
        """Harm `victim`, and return whether it was there."""
        pid = (self.workers | self.queues[-1].pids).get(victim)
        if pid is None:
            return False
        if self._local is not None and _is_worker(victim):
            handle = next(one for one in self._local[-1].handles[::-1] if one.name == victim)
            self.workers.pop(victim)
            self._killing.append(asyncio.get_running_loop().create_task(_kill(handle)))
        else:
            try:
                os.kill(pid, how)
            except ProcessLookupError:  # it has just died
                return False
        self.done.append(f"{self._events}: {how.name} {victim}")
        return True


def _is_worker(name: str) -> bool:
    return any(name in kind for kind in WORKERS)


async def _kill(handle: LocalHandle) -> None:
    await handle.kill()
    await handle.free()


def run(config: RunConfig, faults: Faults, *, resume: bool = False) -> int:
    """Train with `faults`, and return the exit code."""

    class Heard(EventLog):
        def forward(self, event: Event) -> None:
            super().forward(event)
            faults.hear(event)

    class Known(QueueProcesses):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            faults.queues.append(self)

    def spec(**values: Any) -> WorkerSpec:
        if values["name"] == "trainer":
            values["factory"] = "tests.helpers.faulty_run:recording"
        return WorkerSpec(**values)

    with ExitStack() as stack:
        stack.enter_context(patch("tailrace.run.log.EventLog", Heard))
        stack.enter_context(patch("tailrace.run.queue.queue_processes", Known))
        stack.enter_context(patch("tailrace.run.separated.WorkerSpec", spec))
        return train(config, resume=resume)


def rows_of_steps(directory: Path) -> dict[int, list[int]]:
    """For each step, the `order` of the rows on which it was last trained."""
    lines = (directory / "trained.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def main() -> int:
    config, seed = sys.argv[1:]
    faults = Faults(int(seed))
    try:
        return run(load_config(json.loads(config)), faults)
    finally:
        print("done:", *faults.done, sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
