"""The seconds of a training step, measured in a real run (pipeline_run.py) that plays a workload."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from pipeline_figures import Turn

from tailrace.bench.setup import Setup
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.workloads.files import parquet_of

HERE = Path(__file__).parent
_LIMIT_S = 1200.0


class Seconds(NamedTuple):
    """Seconds of a training step, and of its parts."""

    step: float
    generating: float
    training: float

    def __str__(self) -> str:
        """The step, and its parts in brackets."""
        return f"{self.step:.2f} s ({self.generating:.2f} generating, {self.training:.2f} training)"


def measured(setup: Setup, *, warm_up: int, steps: int) -> Seconds:
    """Those of a real run of so many steps; the first of them do not count."""
    config, directory = setup.config, Path(setup.config.output_dir)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    trace = directory / run_files.PLAYED_TRACE
    trace.parent.mkdir(parents=True, exist_ok=True)
    trace.write_bytes(parquet_of(setup.trace))
    (directory / "config.json").write_text(config.model_dump_json())
    command = [sys.executable, str(HERE / "pipeline_run.py"), str(directory), str(warm_up), str(steps)]
    with (directory / "log").open("wb") as log:
        environment = {**os.environ, **KEPT_MEMORY}
        subprocess.run(command, cwd=HERE, env=environment, stdout=log, stderr=log, timeout=_LIMIT_S, check=True)
    turn = Turn(directory, warm_up)
    step_s = turn.window.seconds / len(turn.steps)
    parts = {"generation": 0.0, "update": 0.0}
    for event in turn.events:
        if event.task == EventKind.BREAKDOWN and event.end > event.start:
            share = turn.window.of(event) / (event.end - event.start)
            for phase in parts:
                parts[phase] += share * event.metrics.get(phase, 0.0) / len(turn.steps)
    return Seconds(step_s, parts["generation"], parts["update"])
