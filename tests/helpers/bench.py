"""What tests of benchmarks use: a recipe, an adapter, results that no run has made."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import yaml

from tailrace.bench.figures import STAGES, Figures, StepFigures, WorkerFigures
from tailrace.bench.single import Result
from tests.conftest import Command, TinyModel
from tests.helpers.runs import small_run, write_prompts

ADAPTER = shlex.join([sys.executable, str(Path(__file__).parent / "bench_adapter.py")])
"""The command of `bench_adapter.py`."""
SEPARATED = ("pipeline.placement=separated", "queue.type=service", "threads=null")
"""Changes that give the workers of the recipe processes of their own."""


def write_recipe(directory: Path, tiny_model: TinyModel) -> Path:
    """Write a recipe of 4 steps of 2 groups of 4, with evaluations and rewards."""
    config = small_run(directory / "run", tiny_model("llama"), write_prompts(directory / "prompts.jsonl"))
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


class Here:
    """Stands in for `run_child` where a program runs `tailrace`: it does so in this process, which is quicker."""

    def __init__(self, tailrace_here: Command) -> None:
        self._tailrace = tailrace_here
        self.said: list[tuple[str, str]] = []
        """What each has written to standard output and standard error."""

    def __call__(self, command: Sequence[str], *, stdout: IO[str] | int) -> int:
        assert list(command[:3]) == [sys.executable, "-m", "tailrace"]
        done = self._tailrace(*command[3:])
        self.said.append((done.stdout, done.stderr))
        return done.returncode


def result(step_s: float, *, updates: float | None = 2.0) -> Result:
    """The result of 3 steps; `updates`: response tokens a second of updates."""
    stages = dict.fromkeys(STAGES, 0.0) | {"generation": 1.0, "update": 1.0}
    step = StepFigures(step=1, seconds=step_s, stages=stages, samples=4, response_tokens=1234, tail_share=0.25)
    busy = WorkerFigures(
        worker="engine",
        shares={"busy": 0.75, "data": 0.25, "weights": 0.0, "idle": 0.0},
        phases={"generation": 0.75, "tools": 0.2, "data": 0.05, "reward": 0.001},
        parts={"generation": {"decode": 0.5, "prefill": 0.25}},
        peak_memory_gib=1.5,
    )
    process = WorkerFigures(worker="driver", shares={}, phases={}, parts={}, peak_memory_gib=None)
    figures = Figures(
        steps=[step],
        seconds=3 * step_s,
        step_s=step_s,
        stages=dict.fromkeys(STAGES, 1.0),
        samples_per_s=1.0,
        tokens_per_s=100 / step_s,
        tokens_per_s_device=50 / step_s,
        training_tokens_per_s=updates,
        tail_share=0.0,
        workers=[process, busy],
    )
    return Result(
        workload="a",
        system="tailrace",
        samples=4,
        prompt_tokens=1,
        response_tokens=5678,
        longest_response=1,
        limit=2048,
        cut=2,
        warm_up=1,
        figures=figures,
    )
