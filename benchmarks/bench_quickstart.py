"""`make bench-quickstart`: what the quickstart reaches, and the time that it takes, beside the recipe grpo.

    python benchmarks/bench_quickstart.py [--seeds 3] [--grpo-seeds 3] [CHANGES ...]

Both recipes train SmolLM2 on the same problems. For each seed both make a whole run, one after the other. The accuracy
is greedy, on the held-out problems, after the last step. The seconds are those of all steps, with the evaluations
beside them, and without loading, checkpoints and the evaluations of the first and the last weights. The signal is the
part of the groups of the last ten steps whose rewards are not all equal. The last line is JSON: the means over the
seeds.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

import typer

from tailrace.config.load import load_config
from tailrace.events import read_events
from tailrace.registers import run_files
from tailrace.registers.events import EventKind

BUILD = Path(__file__).parents[1] / "build" / "bench-quickstart"
RECIPES = ("quickstart", "grpo")
LAST = 10
RUN_LIMIT_S = 2 * 3600.0


class Outcome(NamedTuple):
    """What a run has reached."""

    accuracy: float
    signal: float
    seconds: float


def outcome(run: Path, groups_per_step: int) -> Outcome:
    """Read a finished run. `groups_per_step`: of its recipe."""
    events = list(read_events(run / run_files.EVENTS))
    steps = [event for event in events if event.task == EventKind.STEP]
    flat = fmean(event.metrics["flat_groups"] for event in steps[-LAST:])
    evaluations = [event for event in events if event.task == EventKind.EVALUATION]
    return Outcome(
        accuracy=evaluations[-1].metrics["accuracy"],
        signal=1 - flat / groups_per_step,
        seconds=sum(event.end - event.start for event in steps),
    )


def play(recipe: str, seed: int, changes: Sequence[str]) -> Outcome:
    """Make a whole run."""
    run = BUILD / f"{recipe}-{seed}"
    overrides = [f"output_dir={run}", f"seed={seed}", *changes]
    command = [sys.executable, "-m", "tailrace", "train", recipe, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    return outcome(run, load_config(Path(recipe), overrides).groups_per_step)


def main(
    changes: Annotated[list[str] | None, typer.Argument(help="To both recipes, such as device=cuda.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of the quickstart.")] = 3,
    grpo_seeds: Annotated[int | None, typer.Option(min=1, help="Runs of grpo; by default as many.")] = None,
) -> None:
    """Make all runs, in turns."""
    shutil.rmtree(BUILD, ignore_errors=True)
    found: dict[str, list[Outcome]] = {recipe: [] for recipe in RECIPES}
    runs = {"quickstart": seeds, "grpo": min(seeds, grpo_seeds or seeds)}
    for seed in range(seeds):
        for recipe in (one for one in RECIPES[:: 1 if seed % 2 == 0 else -1] if seed < runs[one]):
            found[recipe].append(play(recipe, seed, changes or []))
            print(f"{recipe:>10} seed {seed}: {found[recipe][-1]}", flush=True)
    means = {
        field: {recipe: round(fmean(getattr(one, field) for one in of), 3) for recipe, of in found.items()}
        for field in Outcome._fields
    }
    times = [ours.seconds / theirs.seconds for ours, theirs in zip(*found.values(), strict=False)]
    print(json.dumps({"bench": "quickstart", "runs": runs, **means, "seconds_over_grpo": round(fmean(times), 3)}))


if __name__ == "__main__":
    typer.run(main)
