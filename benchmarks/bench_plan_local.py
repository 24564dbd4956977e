"""`make bench-plan-local`: the plan for this machine beside all others, which are measured: the quickstart, two cores.

    python benchmarks/bench_plan_local.py [RECIPE] [--rounds 7]

`tailrace plan quickstart --cluster local` is made once. Then every plan that it weighed in one process has a turn: a
real run of its first steps, without evaluations. With separate workers, the trainer has half of the cores. One plan
for each size of its micro-batches has a turn. Where its training alone takes longer than the quickest step so far, the
other plans with that trainer are ruled out; else they have turns, too. The quickest of all, and the one that was
chosen, have further turns of six steps, in rounds. The chosen plan is compared with each of the others within the
rounds, since the machine's pace changes from one to the next, and the median of these ratios counts. The last line is
JSON.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from bench_pipeline import two_cores
from real_run import Seconds, measured

from tailrace.commands.plan_local import AskedHere, document, local_problem
from tailrace.config.load import load_config
from tailrace.planner.local import LocalPlan, local_plans

BUILD = Path(__file__).parent.parent / "build" / "bench-plan-local"


class Length(NamedTuple):
    """The steps of a run."""

    warm_up: int
    """Those that do not count."""
    steps: int


SHORT, LONG = Length(1, 3), Length(2, 6)
FINALISTS = 4
UNWATCHED = ("prompts.held_out=0", "checkpoint.every=1000")
"""Neither evaluations nor checkpoints, which plans leave out."""
SLOWER = 1.1
"""By how many times a trainer alone takes longer than the quickest step, for its plans to be ruled out."""
_AT_MOST = 1.05


def turn(plan: LocalPlan, length: Length) -> Seconds:
    """Those of a step of a real run."""
    config = load_config(plan.values, [f"output_dir={BUILD / 'run'}"])
    seconds = measured(config, warm_up=length.warm_up, steps=length.steps)
    print(f"{json.dumps(document(plan))} measured {seconds}", flush=True)
    return seconds


def turns(plans: Sequence[LocalPlan], found: dict[int, list[float]], *, length: Length, seed: int) -> None:
    """Give each of these plans a turn, in an order that is drawn."""
    order = list(plans)
    random.Random(seed).shuffle(order)
    for plan in order:
        found.setdefault(id(plan), []).append(turn(plan, length).step)


def sweep(plans: Sequence[LocalPlan]) -> dict[int, float]:
    """Seconds of a step of every plan that is not ruled out."""
    found: dict[int, list[float]] = {}
    turns([plan for plan in plans if plan.mode.colocated], found, length=SHORT, seed=0)
    apart = [plan for plan in plans if not plan.mode.colocated]
    for tokens in sorted({plan.micro_batch_tokens for plan in apart}):
        first, *others = sorted(
            (plan for plan in apart if plan.micro_batch_tokens == tokens),
            key=lambda plan: (plan.mode.max_staleness, -plan.slots),  # with the least of the engine beside the trainer
        )
        seconds = turn(first, SHORT)
        found[id(first)] = [seconds.step]
        if seconds.training < SLOWER * min(each for (each,) in found.values()):
            turns(others, found, length=SHORT, seed=tokens)
    return {plan: seconds for plan, (seconds,) in found.items()}


def over(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios within the rounds."""
    return statistics.median(own / other for own, other in zip(ours, theirs, strict=True))


def main(recipe: Annotated[Path, typer.Argument()] = Path("quickstart"), rounds: int = 7) -> None:
    """Plan, then measure every plan."""
    BUILD.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, two_cores().values())
    began = time.monotonic()
    problem = local_problem(
        AskedHere(recipe=recipe, overrides=UNWATCHED, workload=None, profile=None, search_modes=True)
    )
    plans = local_plans(problem, search_modes=True)
    planned_s = time.monotonic() - began
    chosen = plans[0]
    once = sweep(plans)
    tried = [plan for plan in plans if id(plan) in once]
    finalists = sorted(tried, key=lambda plan: once[id(plan)])[:FINALISTS]
    if chosen not in finalists:
        finalists.append(chosen)
    found: dict[int, list[float]] = {}
    for seed in range(1, rounds + 1):
        turns(finalists, found, length=LONG, seed=seed)
    ratios = {id(plan): over(found[id(chosen)], found[id(plan)]) for plan in finalists}
    best = max(finalists, key=lambda plan: ratios[id(plan)])
    medians = {id(plan): statistics.median(found[id(plan)]) for plan in finalists}
    seconds = once | medians
    errors = [abs(plan.step_s / seconds[id(plan)] - 1) for plan in tried]
    figures: dict[str, Any] = {
        "bench": "plan_local",
        "recipe": str(recipe),
        "chosen_over_best": round(ratios[id(best)], 3),
        "at_most": _AT_MOST,
        "plan_s": round(planned_s),
        "measured_plans": len(tried),
        "ruled_out_plans": len(plans) - len(tried),
        "error_pct": {"median": round(100 * statistics.median(errors), 1), "worst": round(100 * max(errors), 1)},
        "chosen": document(chosen) | {"measured_s": round(medians[id(chosen)], 2)},
        "best": document(best) | {"measured_s": round(medians[id(best)], 2)},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
