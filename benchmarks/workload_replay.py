"""How near a replay comes to the run that it replays: the quickstart's model and task, in three modes.

    python benchmarks/workload_replay.py

Each pair is a real run, whose trace is then played by `tailrace bench` with dummy prompts and forced lengths. The error
is the difference of their end-to-end latencies, from the first prompt to the last update. The last line is JSON.
"""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tailrace.bench.figures import figures_of
from tailrace.events import read_events

BUILD = Path(__file__).parents[1] / "build" / "bench-workloads"
COMMON = ["checkpoint.every=100000", "observe.tensorboard=false", "observe.sample_groups=0", "prompts.held_out=0"]
MODES = {
    "synchronous": ["quickstart"],
    "streaming": ["smollm2_async", "pipeline.max_staleness=0", "weights.mode=synchronous"],
    "fully_asynchronous": ["smollm2_async"],
}
"""A recipe and the changes to it, by mode."""


def tailrace(*arguments: str, log: Path) -> None:
    """Run the command, with its output in `log`."""
    with log.open("ab") as file:
        done = subprocess.run([sys.executable, "-m", "tailrace", *arguments], stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"tailrace {' '.join(arguments)} ended with exit code {done.returncode}; see {log}")


def seconds_of(run: Path) -> float:
    """End-to-end seconds of all steps of a run."""
    return figures_of(read_events(run / "events.jsonl"), warm_up=0, devices=1).seconds


def pair(mode: str, steps: int, directory: Path) -> tuple[float, float]:
    """Make a real run and replay it. Returns the seconds of both."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log, real, replay = directory / "log", directory / "real", directory / "replay"
    recipe, *changes = MODES[mode]
    tailrace("train", recipe, *changes, *COMMON, f"trainer.steps={steps}", f"output_dir={real}", log=log)
    tailrace("trace", "export", str(real), log=log)
    trace = str(real / "workload.parquet")
    tailrace("bench", trace, recipe, *changes, "--warm-up", "0", f"output_dir={replay}", log=log)
    for weights in ("model", "checkpoints"):
        shutil.rmtree(real / weights, ignore_errors=True)
    return seconds_of(real), seconds_of(replay)


def replay_error_pct(*, pairs: int, steps: int) -> dict[str, float]:
    """Return the median error of each mode, in percent of the real run. The modes take turns."""
    errors: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(pairs):
        for mode in MODES:
            real, replay = pair(mode, steps, BUILD / f"{mode}-{number}")
            errors[mode].append(100 * (replay / real - 1))
            print(f"{mode:<20} real {real:6.1f} s  replay {replay:6.1f} s  {errors[mode][-1]:+.1f} %", flush=True)
    return {mode: statistics.median(map(abs, of_mode)) for mode, of_mode in errors.items()}


def main(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of each mode.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Training steps of a run.")] = 12,
) -> None:
    """Measure, and print the worst mode's median error."""
    by_mode = {mode: round(error, 2) for mode, error in replay_error_pct(pairs=pairs, steps=steps).items()}
    print(json.dumps({"replay_error_pct": max(by_mode.values()), "by_mode": by_mode}))


if __name__ == "__main__":
    typer.run(main)
