"""The seconds of a training step, measured in a real run (pipeline_run.py)."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline_figures import Turn
from pipeline_turn import training

from tailrace.bench.setup import Setup
from tailrace.config.run import RunConfig
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.workloads.files import parquet_of

_LIMIT_S = 1200.0


class Seconds(NamedTuple):
    """Seconds of a training step, and of its parts."""

    step: float
    generating: float
    training: float

    def __str__(self) -> str:
        """The step, and its parts in brackets."""
        return f"{self.step:.2f} s ({self.generating:.2f} generating, {self.training:.2f} training)"


def measured_setup(setup: Setup, *, warm_up: int, steps: int) -> Seconds:
    """Those of a run that plays a workload; see `measured`."""
    played = {run_files.PLAYED_TRACE: parquet_of(setup.trace)}
    return measured(setup.config, warm_up=warm_up, steps=steps, files=played)


def measured(config: RunConfig, *, warm_up: int, steps: int, files: Mapping[str, bytes] | None = None) -> Seconds:
    """Those of a real run of so many steps; the first of them do not count. `files`: see `training`.

    Raises:
        RuntimeError: the run failed.
        subprocess.TimeoutExpired: it took too long.
    """
    directory = Path(config.output_dir)
    with training(directory, config.model_dump_json(), warm_up=warm_up, steps=steps, files=files) as process:
        process.wait(_LIMIT_S)
    turn = Turn(directory, warm_up)
    step_s = turn.window.seconds / len(turn.steps)
    parts = {"generation": 0.0, "update": 0.0}
    for event in turn.events:
        if event.task == EventKind.BREAKDOWN and event.end > event.start:
            share = turn.window.of(event) / (event.end - event.start)
            for phase in parts:
                parts[phase] += share * event.metrics.get(phase, 0.0) / len(turn.steps)
    return Seconds(step_s, parts["generation"], parts["update"])
