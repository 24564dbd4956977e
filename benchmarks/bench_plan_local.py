"""`make bench-plan-local`: the plan for this machine beside all others, each measured: the recipe grpo on two cores.

    python benchmarks/bench_plan_local.py [--rounds 3]

`tailrace plan grpo --cluster local` is made once. Then every plan that it weighed has a turn: a real run of three
steps, with the lengths of the model's own responses. The quickest of them, and the one that was chosen, have further
turns of six steps, and the medians of these count. The last line is JSON.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml
from bench_pipeline import two_cores
from real_run import measured

from tailrace.bench.setup import make_setup
from tailrace.commands.plan_local import AskedHere, document, local_problem
from tailrace.planner.local import LocalPlan, LocalProblem, local_plans
from tailrace.planner.problem import repeated
from tailrace.workloads.files import parquet_of
from tailrace.workloads.trace import Provenance

BUILD = Path(__file__).parent.parent / "build" / "bench-plan-local"


class Length(NamedTuple):
    """The steps of a run."""

    warm_up: int
    """Those that do not count."""
    steps: int


SHORT, LONG = Length(1, 3), Length(2, 6)
AHEAD = 3
"""Further steps of the workload, for engines that are ahead."""
FINALISTS = 5
_AT_MOST = 1.05


def step_s(plan: LocalPlan, workload: Path, length: Length) -> float:
    """Seconds of a step of a real run."""
    recipe = BUILD / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**plan.values, "output_dir": str(BUILD / "run")}))
    setup = make_setup(str(workload), recipe, ["checkpoint.every=1000"])
    return measured(setup, warm_up=length.warm_up, steps=length.steps).step


def written(problem: LocalProblem) -> Path:
    """Write the lengths that all runs play, and return the file."""
    per_step = problem.config.groups_per_step
    replay = repeated(problem.drawn, (LONG.steps + AHEAD) * per_step)
    path = BUILD / "workload.parquet"
    path.write_bytes(parquet_of(replay.trace(Provenance(source="the model's own responses"), groups_per_step=per_step)))
    return path


def turns(
    plans: Sequence[LocalPlan], workload: Path, found: dict[int, list[float]], *, length: Length, seed: int
) -> None:
    """Give each of these plans a turn, in an order that is drawn."""
    order = list(plans)
    random.Random(seed).shuffle(order)
    for plan in order:
        seconds = step_s(plan, workload, length)
        found.setdefault(id(plan), []).append(seconds)
        print(f"{json.dumps(document(plan))} measured {seconds:.2f}", flush=True)


def main(rounds: int = 3) -> None:
    """Plan, then measure every plan."""
    BUILD.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, two_cores().values())
    began = time.monotonic()
    problem = local_problem(
        AskedHere(recipe=Path("grpo"), overrides=(), workload=None, profile=None, search_modes=True)
    )
    plans = local_plans(problem, search_modes=True)
    planned_s = time.monotonic() - began
    chosen, workload = plans[0], written(problem)
    once: dict[int, list[float]] = {}
    turns(plans, workload, once, length=SHORT, seed=0)
    finalists = sorted(plans, key=lambda plan: once[id(plan)])[:FINALISTS]
    if chosen not in finalists:
        finalists.append(chosen)
    found: dict[int, list[float]] = {}
    for seed in range(1, rounds + 1):
        turns(finalists, workload, found, length=LONG, seed=seed)
    medians = {id(plan): statistics.median(found[id(plan)]) for plan in finalists}
    best = min(finalists, key=lambda plan: medians[id(plan)])
    seconds = {plan: seconds for plan, (seconds,) in once.items()} | medians
    errors = [abs(plan.step_s / seconds[id(plan)] - 1) for plan in plans]
    figures: dict[str, Any] = {
        "bench": "plan_local",
        "chosen_over_best": round(medians[id(chosen)] / medians[id(best)], 3),
        "at_most": _AT_MOST,
        "plan_s": round(planned_s),
        "measured_plans": len(plans),
        "error_pct": {"median": round(100 * statistics.median(errors), 1), "worst": round(100 * max(errors), 1)},
        "chosen": document(chosen) | {"measured_s": round(medians[id(chosen)], 2)},
        "best": document(best) | {"measured_s": round(medians[id(best)], 2)},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
