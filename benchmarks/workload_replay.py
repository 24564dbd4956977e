"""How near a replay comes to the run that it replays: the recipe grpo, in three modes.

    python benchmarks/workload_replay.py
    python benchmarks/workload_replay.py --mode synchronous device=cuda

Each pair is a real run, whose trace is then played by `tailrace bench` with dummy prompts and forced lengths. The error
is the difference of their end-to-end latencies, from the first prompt to the last update. The last line is JSON.

A machine's pace changes by tens of percent within a minute. The steps of a synchronous run do not overlap, and a second
run with the same seed makes the same responses. So there the trace of one run is recorded, and in each pair that run is
made again beside its replay, step by step in turns (`replay_turns.py`). In the other modes one run follows the other,
and each lasts two minutes and more.
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
from gate import Contestant

from tailrace.bench.figures import figures_of
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.report.run_data import load_run

BUILD = Path(__file__).parents[1] / "build" / "bench-workloads"
SIDE = Path(__file__).with_name("replay_turns.py")
LIMIT_S = 3600.0
"""Seconds that a command may take."""
COMMON = ["checkpoint.every=100000", "observe.tensorboard=false", "observe.sample_groups=0", "prompts.held_out=0"]


class Mode(NamedTuple):
    """A mode of a run."""

    recipe: str
    changes: tuple[str, ...] = ()
    in_turns: bool = False
    """Whether the steps of a run and its replay take turns."""


Name = Literal["synchronous", "streaming", "fully_asynchronous"]
MODES: dict[Name, Mode] = {
    "synchronous": Mode("grpo", in_turns=True),
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


def record(mode: Mode, changes: Sequence[str], directory: Path) -> Path:
    """Make a real run in `directory` / real. Returns its trace."""
    _empty(directory)
    log, real = directory / "log", directory / "real"
    tailrace("train", mode.recipe, *mode.changes, *COMMON, *changes, f"output_dir={real}", log=log)
    tailrace("trace", "export", str(real), log=log)
    for weights in ("model", "checkpoints"):
        shutil.rmtree(real / weights, ignore_errors=True)
    return real / "workload.parquet"


def _empty(directory: Path) -> None:
    """Make a directory anew."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def pair_one_by_one(mode: Mode, changes: Sequence[str], directory: Path) -> tuple[float, float]:
    """Make a real run and replay it, both with `changes` to their recipe. Returns the seconds of both."""
    trace = record(mode, changes, directory)
    replay = directory / "replay"
    words = (mode.recipe, *mode.changes, *changes)
    tailrace("bench", str(trace), *words, "--warm-up", "0", f"output_dir={replay}", log=directory / "log")
    return seconds_of(trace.parent), seconds_of(replay)


def pair_in_turns(mode: Mode, steps: int, changes: Sequence[str], directory: Path, trace: Path) -> tuple[float, float]:
    """Repeat the run of `trace` and replay it, step by step in turns. Returns the seconds of both.

    Raises:
        SystemExit: a step of one has other lengths than that of the other.
    """
    _empty(directory)
    words = (*mode.changes, *COMMON, *changes)
    given = {"real": "-", "replay": str(trace)}
    sides: dict[str, Contestant] = {}
    seconds = dict.fromkeys(given, 0.0)
    try:
        for step in range(steps):
            tokens = {}
            for name in given if step % 2 == 0 else reversed(given):
                if name not in sides:  # it starts in its own turn
                    command = [sys.executable, str(SIDE), mode.recipe, given[name], *words]
                    command.append(f"output_dir={directory / name}")
                    sides[name] = Contestant(command, directory / f"{name}.log", KEPT_MEMORY)
                figures = sides[name].step()
                seconds[name] += figures["seconds"]
                tokens[name] = figures["response_tokens"]
            if tokens["real"] != tokens["replay"]:
                raise SystemExit(f"step {step} of {directory} has other lengths than its replay: {tokens}")
    finally:
        for side in sides.values():
            side.stop()
    return seconds["real"], seconds["replay"]


def replay_differences_pct(
    *, pairs: int, steps: int, modes: Sequence[Name] = get_args(Name), changes: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Return by how much each replay took longer than its run, in percent, by mode. The modes take turns."""
    differences: dict[str, list[float]] = {name: [] for name in modes}
    changes = (*changes, f"trainer.steps={steps}")
    traces = {name: record(MODES[name], changes, BUILD / f"{name}-trace") for name in modes if MODES[name].in_turns}
    for number in range(pairs):
        for name in modes:
            mode, directory = MODES[name], BUILD / f"{name}-{number}"
            if name in traces:
                real, replay = pair_in_turns(mode, steps, changes, directory, traces[name])
            else:
                real, replay = pair_one_by_one(mode, changes, directory)
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
    steps: Annotated[int, typer.Option(min=2, help="Steps of a run.")] = 12,
) -> None:
    """Measure the modes."""
    modes = get_args(Name) if mode is None else (mode,)
    differences = replay_differences_pct(pairs=pairs, steps=steps, modes=modes, changes=changes or ())
    print(json.dumps(replay_figures(differences)))


if __name__ == "__main__":
    typer.run(main)
