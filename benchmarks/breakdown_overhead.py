"""`make bench-breakdown`: what a run pays for `observe.breakdown`, as a part of a training step.

One colocated run of the recipe grpo makes steps of equal size: every response has as many tokens as it may, and
the learning rate is next to 0. Steps go in rounds of four, with the breakdown on, off, off and on. So a round compares
equal steps that follow each other, in one process. The first round is warm-up, and the median of the others counts.

A busy machine hides a percent. So the work itself is measured as well, in the steps with the breakdown: the CPU seconds
inside the functions that make it and write its events, over those of the same steps. The measuring counts too. The last
line is JSON.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from tailrace.activity import Activity
from tailrace.config.load import load_config
from tailrace.engine.profile import StepTimes
from tailrace.host.stopwatch import Stopwatch
from tailrace.registers.events import EventKind
from tailrace.run.learner import LocalLearner
from tailrace.run.train import train
from tailrace.run.worker_metrics import WorkerMetrics
from tailrace.tasks.memory import MemoryUse
from tailrace.trainer.memory import TrainerMemory

RECIPE = Path(__file__).parents[1] / "recipes" / "grpo.yaml"
ROUND = (True, False, False, True)
"""Whether each step of a round has the breakdown on."""
SETTINGS = (
    "sampling.ignore_eos=true",
    "trainer.lr=1e-15",
    "prompts.held_out=0",
    "checkpoint.every=1000000",
    "observe.tensorboard=false",
)
WORK: tuple[tuple[type, str], ...] = (
    (Activity, "_broken_down"),
    (MemoryUse, "emit"),
    (StepTimes, "add"),
    (Stopwatch, "lap"),
    (TrainerMemory, "note"),
    (WorkerMetrics, "__call__"),
)
"""The functions that make the breakdown, beside the writing of its events. The last four also work while it is off."""


@dataclass
class Measured:
    """The seconds of the steps so far, and of the functions that make the breakdown."""

    is_on: bool = False
    """Whether a step with the breakdown is under way: only then do these functions count."""
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    work_s: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    _here: threading.local = field(default_factory=threading.local)
    """Has `measuring` in a thread that is inside one of the functions: a call in it counts already."""

    def timed(self, owner: type, name: str) -> Callable[..., Any]:
        """The method, with its CPU time added up."""
        method, label = getattr(owner, name), f"{owner.__name__}.{name}"

        def measure(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or getattr(self._here, "measuring", False):
                return method(*args, **kwargs)
            self._here.measuring, began = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._here.measuring = False
                self.work_s[label] = self.work_s.get(label, 0.0) + time.thread_time() - began
                self.calls[label] = self.calls.get(label, 0) + 1

        return measure

    def of_breakdown(self, emit: Callable[..., None]) -> Callable[..., None]:
        """`Activity._emit`, with its CPU time added up for the events of the breakdown alone."""
        timed = self.timed(Activity, "_emit")

        def chosen(owner: Activity, kind: EventKind, *rest: Any) -> None:
            (timed if kind == EventKind.BREAKDOWN else emit)(owner, kind, *rest)

        return chosen

    def step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """The training step, which is measured, and has the breakdown on or off."""

        async def measure(learner: LocalLearner, step: int) -> None:
            self.is_on = ROUND[step % len(ROUND)]
            wall, cpu = time.perf_counter(), time.process_time()
            await train_step(learner, step)
            self.wall_s.append(time.perf_counter() - wall)
            self.cpu_s.append(time.process_time() - cpu)
            self.is_on = False

        return measure

    def when_on(self, emit: Callable[..., None]) -> Callable[..., None]:
        """A method of `Activity` or `MemoryUse` that emits only while the breakdown is on."""

        def switched(owner: Activity | MemoryUse) -> None:
            if isinstance(owner, Activity):
                owner._breakdown = self.is_on
            elif not self.is_on:
                return
            emit(owner)

        return switched

    def overhead(self, seconds: list[float]) -> float:
        """The median over the rounds of what a step with the breakdown takes more, as a fraction."""
        rounds = [seconds[first : first + len(ROUND)] for first in range(len(ROUND), len(seconds), len(ROUND))]
        return statistics.median((on + again) / (off + too) - 1 for on, off, too, again in rounds)


def main(
    changes: Annotated[list[str] | None, typer.Argument(help="To the recipe, such as device=cuda.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of four steps, after one of warm-up.")] = 5,
) -> None:
    """Make the run and print the figures."""
    measured = Measured()
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(LocalLearner, "train", measured.step(LocalLearner.train)),
    ):
        patch.object(Activity, "_emit", measured.of_breakdown(Activity._emit)).start()
        for owner, name in WORK:
            patch.object(owner, name, measured.timed(owner, name)).start()
        for owner in (Activity, MemoryUse):
            patch.object(owner, "emit", measured.when_on(owner.emit)).start()
        steps = len(ROUND) * (rounds + 1)
        sizes = (f"trainer.steps={steps}", f"output_dir={directory}/run")
        config = load_config(RECIPE, [*SETTINGS, *(changes or ()), *sizes])
        train(config, resume=False)
        patch.stopall()
    print(json.dumps({"bench": "breakdown_overhead"} | figures_of(measured)))


def figures_of(measured: Measured) -> dict[str, Any]:
    """The figures of the last line, in percent of a step."""
    total = sum(seconds for step, seconds in enumerate(measured.cpu_s) if ROUND[step % len(ROUND)])
    by_function = {name: round(100 * seconds / total, 4) for name, seconds in measured.work_s.items()}
    return {
        "breakdown_overhead_pct": round(100 * sum(measured.work_s.values()) / total, 3),
        "more_wall_pct": round(100 * measured.overhead(measured.wall_s), 2),
        "more_cpu_pct": round(100 * measured.overhead(measured.cpu_s), 2),
        "by_function_pct": by_function,
        "calls": measured.calls,
        "step_s": round(statistics.median(measured.wall_s), 2),
    }


if __name__ == "__main__":
    typer.run(main)
