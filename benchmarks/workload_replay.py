"""How near a replay comes to the run that it replays: the quickstart's model and task, in three modes.

    python benchmarks/workload_replay.py
    python benchmarks/workload_replay.py --mode synchronous device=cuda

Each pair is a real run, whose trace is then played by `tailrace bench` with dummy prompts and forced lengths. The error
is the difference of their end-to-end latencies, from the first prompt to the last update. The last line is JSON.

A machine's pace drifts by several percent within a minute. So each run lasts two minutes and more.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import typer

from tailrace.bench.figures import figures_of
from tailrace.report.run_data import load_run

BUILD = Path(__file__).parents[1] / "build" / "bench-workloads"
LIMIT_S = 3600.0
"""Seconds that a command may take."""
COMMON = ["checkpoint.every=100000", "observe.tensorboard=false", "observe.sample_groups=0", "prompts.held_out=0"]


class Mode(NamedTuple):
    """A mode of a run."""

    recipe: str
    changes: tuple[str, ...] = ()
    times: int = 1
    """How many times the steps of other modes a run makes: where steps are quick, more of them take as long."""


Name = Literal["synchronous", "streaming", "fully_asynchronous"]
MODES: dict[Name, Mode] = {
    "synchronous": Mode("quickstart", times=2),
    "streaming": Mode("smollm2_async", ("pipeline.max_staleness=0", "weights.mode=synchronous")),
    "fully_asynchronous": Mode("smollm2_async"),
}


def tailrace(*arguments: str, log: Path) -> None:
    """Run the command, with its output in `log`."""
    with log.open("ab") as file:
        command = [sys.executable, "-m", "tailrace", *arguments]
        done = subprocess.run(command, stdout=file, stderr=file, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"tailrace {' '.join(arguments)} ended with exit code {done.returncode}; see {log}")


def seconds_of(run: Path) -> float:
    """End-to-end seconds of all steps of a run."""
    return figures_of(load_run(run).events, warm_up=0, devices=1).seconds


def pair(mode: Mode, steps: int, changes: Sequence[str], directory: Path) -> tuple[float, float]:
    """Make a real run and replay it, both with `changes` to their recipe. Returns the seconds of both."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log, real, replay = directory / "log", directory / "real", directory / "replay"
    words = (mode.recipe, *mode.changes, *changes)
    tailrace("train", *words, *COMMON, f"trainer.steps={steps * mode.times}", f"output_dir={real}", log=log)
    tailrace("trace", "export", str(real), log=log)
    trace = str(real / "workload.parquet")
    tailrace("bench", trace, *words, "--warm-up", "0", f"output_dir={replay}", log=log)
    for weights in ("model", "checkpoints"):
        shutil.rmtree(real / weights, ignore_errors=True)
    return seconds_of(real), seconds_of(replay)


def replay_differences_pct(
    *, pairs: int, steps: int, modes: Sequence[Name] = get_args(Name), changes: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Return by how much each replay took longer than its run, in percent, by mode. The modes take turns."""
    differences: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(pairs):
        for name in modes:
            real, replay = pair(MODES[name], steps, changes, BUILD / f"{name}-{number}")
            differences[name].append(100 * (replay / real - 1))
            print(f"{name:<20} real {real:6.1f} s  replay {replay:6.1f} s  {differences[name][-1]:+.1f} %", flush=True)
    return differences


def replay_figures(differences: dict[str, list[float]]) -> dict[str, Any]:
    """Return the worst mode's median error, and by mode the median error and the median difference, in percent."""
    errors = {mode: statistics.median(map(abs, values)) for mode, values in differences.items()}
    return {
        "replay_error_pct": round(max(errors.values()), 2),
        "replay_error_pct_by_mode": {mode: round(error, 2) for mode, error in errors.items()},
        "replay_difference_pct_by_mode": {mode: round(statistics.median(v), 2) for mode, v in differences.items()},
    }


def main(
    changes: Annotated[list[str] | None, typer.Argument(help="To the recipes, such as device=cuda.")] = None,
    mode: Annotated[Name | None, typer.Option(help="Only this one; by default all.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of each mode.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a run; a synchronous one makes twice as many.")] = 12,
) -> None:
    """Measure the modes."""
    modes = get_args(Name) if mode is None else (mode,)
    differences = replay_differences_pct(pairs=pairs, steps=steps, modes=modes, changes=changes or ())
    print(json.dumps(replay_figures(differences)))


if __name__ == "__main__":
    typer.run(main)
