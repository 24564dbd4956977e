"""`python benchmarks/staleness_curves.py`: what staleness does to learning, on a task that a tiny model learns.

Synchronous, one step asynchronous and fully asynchronous runs of the same recipe, with the same seeds, one after
another on one device. The model is a random Llama of two layers over bytes; the reward is the share of a response's
characters that are digits. A mode's interval is that of the mean reward of the last steps over the seeds, 95 %, by
Student's t. The last line is JSON.
"""

import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' tiny model and recipe

from tailrace.conformance.tiny import write_tiny_model
from tailrace.run import train
from tests.runs import small_run, steps_of, write_prompts

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "one_step": {"max_staleness": 1},
    "fully_asynchronous": {"max_staleness": 1, "streaming": True},
}
LAST = 5
"""Steps whose mean is the final reward."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Of so many seeds: the two-sided 95 % point of Student's t."""


def rewards_of(directory: Path, model: Path, prompts: Path, *, mode: str, seed: int, steps: int) -> list[float]:
    """The mean reward of each step of one run."""
    config = small_run(
        directory,
        model,
        prompts,
        seed=seed,
        pipeline=MODES[mode],
        prompts__held_out=0,
        algorithm={"group_size": 8},
        trainer={"steps": steps, "train_batch_size": 32, "precision": "bf16", "lr": 3e-3},
        engine={"type": "native", "dtype": "bfloat16", "kv_cache_gib": 0.01},
        checkpoint={"every": steps},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, resume=False)
    events = steps_of(directory)
    staleness = max(event.metrics["staleness_max"] for event in events)
    assert staleness <= MODES[mode]["max_staleness"]
    return [event.metrics["reward"] for event in events]


def interval(finals: list[float]) -> tuple[float, float]:
    """Where the mean of a mode is, with 95 %."""
    half = T_95[len(finals)] * statistics.stdev(finals) / math.sqrt(len(finals))
    return statistics.fmean(finals) - half, statistics.fmean(finals) + half


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two intervals have a point in common."""
    return one[0] <= other[1] and other[0] <= one[1]


def main(
    seeds: Annotated[int, typer.Option(min=2, max=max(T_95), help="Runs of each mode.")] = 3,
    steps: Annotated[int, typer.Option(min=LAST, help="Training steps of each run.")] = 20,
) -> None:
    """Compare the modes' learning curves."""
    curves: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        prompts = write_prompts(base / "prompts.jsonl")
        for seed in range(seeds):
            model = write_tiny_model("llama", base / f"model-{seed}", seed=seed)
            for mode in MODES:
                run = base / f"{mode}-{seed}"
                curves[mode].append(rewards_of(run, model, prompts, mode=mode, seed=seed, steps=steps))
                print(f"seed {seed}  {mode:20}" + " ".join(f"{reward:.3f}" for reward in curves[mode][-1]), flush=True)
    finals = {mode: [statistics.fmean(curve[-LAST:]) for curve in curves[mode]] for mode in MODES}
    intervals = {mode: interval(finals[mode]) for mode in MODES}
    print(f"\n{'final reward':22}" + "".join(f"seed {seed:<6}" for seed in range(seeds)) + "mean    95 %")
    for mode, values in finals.items():
        low, high = intervals[mode]
        shown = "".join(f"{value:<11.3f}" for value in values)
        print(f"{mode:22}{shown}{statistics.fmean(values):.3f}   {low:.3f} … {high:.3f}")
    result = {
        "bench": "staleness_curves",
        "steps": steps,
        "final_reward": {mode: [round(value, 3) for value in values] for mode, values in finals.items()},
        "interval_95": {mode: [round(end, 3) for end in ends] for mode, ends in intervals.items()},
        "overlaps_synchronous": {mode: overlap(ends, intervals["synchronous"]) for mode, ends in intervals.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
