"""A turn of `make bench-pipeline`: DIRECTORY WARM_UP STEPS. It trains with the configuration in DIRECTORY/config.json.

It leaves `events.jsonl` there, and `cpu.json` with the CPU seconds of each process from the end of the warm-up on. The
run ends with its last step: nothing is saved, exported or reported.
"""

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil

from tailrace.cluster.cleanup import MARK
from tailrace.cluster.pool import DeathBudget
from tailrace.config.run import RunConfig
from tailrace.events import Event, EventFile, EventLog
from tailrace.host.compute import prepare_torch
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.run.colocated import Colocated
from tailrace.run.inputs import load_inputs
from tailrace.run.parts import Placement
from tailrace.run.queue import open_queue, run_table
from tailrace.run.separated import Separated
from tailrace.run.step_metrics import TaskTimes
from tailrace.trainer.checkpoint import CheckpointStore

PROGRAMS = {
    "tailrace.cluster.guard": "guard",
    "tailrace.transfer.queue": "queue",
    "tailrace.rewards": "grader",
    "raylet": "ray",
    "gcs_server": "ray",
    "ray": "ray",
}
"""Names of processes, by a text in their command lines; the first that is there counts."""


class Meter:
    """CPU seconds of this process and all below it, from `start` to `stop`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def start(self) -> None:
        """Count from now on."""
        self._began = time.perf_counter()
        self._before = self._used()

    def stop(self) -> None:
        """Count until now; processes that have started meanwhile count from their start."""
        after = self._used()
        used: defaultdict[str, float] = defaultdict(float)
        for (_, name), seconds in after.items():
            used[name] += seconds
        for key in self._before.keys() & after.keys():
            used[key[1]] -= self._before[key]
        self.seconds = {name: round(seconds, 2) for name, seconds in used.items()}
        self.seconds["elapsed"] = round(time.perf_counter() - self._began, 2)

    def _used(self) -> dict[tuple[int, str], float]:
        used = {}
        for process in _processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[process.pid, _name(process)] = times.user + times.system
        return used


def _processes() -> set[psutil.Process]:
    """Return this process and all that it has started. Workers are not below it, but have the mark of its Ray."""
    below = {psutil.Process(), *psutil.Process().children(recursive=True)}
    marks = {mark for process in below if (mark := _mark_of(process)) is not None}
    return below | {process for process in psutil.process_iter() if _mark_of(process) in marks}


def _mark_of(process: psutil.Process) -> str | None:
    mark: str | None = None
    with suppress(psutil.Error):  # it has ended, or is another user's
        mark = process.environ().get(MARK)
    return mark


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    if process.pid == os.getpid():
        return "driver"
    if "tailrace.cluster.serve" in command and "tailrace.cluster.guard" not in command:
        return str(command[command.index("tailrace.cluster.serve") + 1])
    line = " ".join(command)
    return next((name for program, name in PROGRAMS.items() if program in line), "others")


class Progress:
    """A sink that counts steps."""

    def __init__(self, warm_up: int, steps: int) -> None:
        """`steps`: number of steps, with those of the warm-up."""
        self.done = asyncio.Event()
        self.meter = Meter()
        self._warm_up = warm_up
        self._left = steps

    def __call__(self, event: Event) -> None:
        """Meter from the last step of the warm-up to the last of all."""
        if event.task != EventKind.STEP or self.done.is_set():
            return
        assert event.step is not None
        self._left -= 1
        if event.step == self._warm_up - 1:
            self.meter.start()
        if not self._left:
            self.meter.stop()
            self.done.set()


async def run(config: RunConfig, directory: Path, warm_up: int, steps: int) -> None:
    """Train so many steps."""
    inputs = load_inputs(config)
    progress = Progress(warm_up, steps)
    async with AsyncExitStack() as stack:
        placement: Placement = Colocated(config, inputs)
        if config.pipeline.placement == "separated":
            placement = Separated(config, inputs, DeathBudget(0))
        await placement.open(stack)
        table = run_table(config)
        queue = await open_queue(config.queue, table, directory / "queue", stack)
        file = EventFile(directory / run_files.EVENTS)
        stack.callback(file.close)
        log = EventLog(sinks=(TaskTimes(), file, progress))
        store = CheckpointStore(directory / run_files.CHECKPOINTS, keep=1)
        pipeline = await placement.connect(queue, store, log, stack)
        await _until(progress.done, asyncio.create_task(pipeline.run()))
    (directory / "cpu.json").write_text(json.dumps(progress.meter.seconds))


async def _until(done: asyncio.Event, running: "asyncio.Task[None]") -> None:
    """Let `running` go on until `done`, or raise its error."""
    waiting = asyncio.create_task(done.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


def main(directory: Path, warm_up: int, steps: int) -> None:
    """Run the turn; `steps` include those of the warm-up."""
    config = RunConfig.model_validate_json((directory / "config.json").read_text())
    if config.pipeline.placement == "colocated":
        prepare_torch(config.device, config.threads)
    asyncio.run(run(config, directory, warm_up, steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
