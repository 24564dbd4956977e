"""`make bench-dispatch`: what knowing lengths gains, and how well they are known.

    python benchmarks/bench_dispatch.py [--rounds 8] [--steps 3] [--prompts 30]

The parts are programs of their own: `dispatch_real.py` (two real engines), `dispatch_virtual.py` (sixteen in virtual
time, with the steps of an H100), `dispatch_recall.py` (expectations beside what came). The last line is JSON.
"""

import asyncio
import json
import logging
import random
import statistics
import time

import typer
from dispatch_real import SHARES, contest, shares
from dispatch_recall import recalls
from dispatch_virtual import ARMS, compare

from tailrace.planning.dispatch.balanced import Balanced
from tailrace.planning.dispatch.base import EngineState, Job
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.workloads.samplers.factory import library

H100_8B = StepCosts(base=6.3e-3, each=1e-5, context=4.5e-8, prefill=2.5e-5)
"""About those of h100_steps.json; the time to decide hardly depends on them."""


def dispatch_ms() -> float:
    """Milliseconds to place 1,024 prompts of 8 samples on 64 engines: the median of 21 decisions."""
    chance = random.Random(0)
    jobs = [
        Job(group=n, samples=8, prompt_tokens=200, expected_tokens=min(16_384, chance.lognormvariate(6.5, 1)))
        for n in range(1024)
    ]
    engines = [EngineState(name=str(n), times=H100_8B, slots=256, cache_tokens=400_000) for n in range(64)]
    seconds = []
    for _ in range(21):
        start = time.perf_counter()
        Balanced().place(jobs, engines)
        seconds.append(time.perf_counter() - start)
    return round(1000 * statistics.median(seconds), 1)


def main(rounds: int = 8, groups: int = 16, slots: int = 16, steps: int = 3, prompts: int = 30) -> None:
    """Make all parts."""
    logging.getLogger("tailrace").setLevel(logging.ERROR)
    decision_ms = dispatch_ms()
    real = shares(asyncio.run(contest(rounds, groups, slots, SHARES)))
    print(json.dumps({"two_engines": real}), flush=True)
    virtual = {}
    for workload in library():
        virtual[workload] = compare(
            workload, engines=16, slots=64, groups=512, group_size=8, steps=steps, arms=list(ARMS)
        )
        print(workload, virtual[workload], flush=True)
    found = {
        "bench": "dispatch",
        "two_engines": real,
        "sixteen_engines": virtual,
        "lpt_over_fifo": {name: round(of["pull_lpt"] / of["pull"], 3) for name, of in virtual.items()},
        "redispatch_gain": {name: round(1 - of["oracle"] / of["oracle_unmoved"], 3) for name, of in virtual.items()},
        "recall": recalls(prompts, 1.0),
        "dispatch_ms": decision_ms,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
