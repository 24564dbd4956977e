"""`make bench-dispatch`: what knowing lengths gains, and how well they are known.

    python benchmarks/bench_dispatch.py [--rounds 5] [--steps 2] [--parts 6] [--longest 512]

The parts are programs of their own: `dispatch_real.py` (two real engines), `dispatch_move.py` (a response that moves
between them), `dispatch_virtual.py` (sixteen in virtual time, with the steps of an H100), `dispatch_recall.py`
(expectations beside what came). The last line is JSON.
"""

import asyncio
import json
import logging
import random
import statistics
import time

import typer
from dispatch_move import measured
from dispatch_real import LONGEST, SHARES, contest, scripts, shares
from dispatch_recall import recalls, with_lengths
from dispatch_virtual import ARMS, MODELS, compare, play, with_model

from tailrace.planning.dispatch.balanced import Balanced
from tailrace.planning.dispatch.base import EngineState, Job
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import library, open_workload

H100_8B = StepCosts(base=6.3e-3, each=1e-5, context=4.5e-8, prefill=2.5e-5)
"""About those of h100_steps.json; the time to decide hardly depends on them."""


def dispatch_ms() -> dict[str, float]:
    """Milliseconds to place 1,024 prompts of 8 samples on 64 engines, where lengths are known, and where they may err.

    Each engine has its own costs, as in a run. "waiting": with slots for half of the samples.
    """
    cases = {"known": (0.0, 256), "may_err": (0.5, 256), "known_waiting": (0.0, 64), "may_err_waiting": (0.5, 64)}
    return {name: _decision_ms(deviation, slots) for name, (deviation, slots) in cases.items()}


def _decision_ms(deviation: float, slots: int) -> float:
    """The median of 21 decisions."""
    chance = random.Random(0)
    jobs = [
        Job(
            group=number,
            samples=8,
            prompt_tokens=200,
            expected_tokens=min(16_384, chance.lognormvariate(6.5, 1)),
            deviation=deviation,
            most_tokens=16_384,
        )
        for number in range(1024)
    ]
    engines = [
        EngineState(name=str(n), times=H100_8B.times(1 + n / 1000), slots=slots, cache_tokens=400_000)
        for n in range(64)
    ]
    seconds = []
    for _ in range(21):
        start = time.perf_counter()
        Balanced().place(jobs, engines)
        seconds.append(time.perf_counter() - start)
    return round(1000 * statistics.median(seconds), 1)


OF_PROMPTS = ("random", "pull", "skewness_siblings", "skewness_ceiling", "oracle")
"""The arms beside which the one with SmolLM2's expectations stands, on its prompts."""
TEMPERATURES = (1.0, 0.2)


def two_engines(rounds: int, groups: int, slots: int, parts: int, longest: int) -> dict[str, dict[str, float]]:
    """The shares on two real engines, with the groups of the workload, and with those of SmolLM2's prompts."""
    replay = scripts(groups, rounds, longest)
    arms = {name: ARMS[name] for name in SHARES}
    found = {"two_engines": shares(asyncio.run(contest(replay, arms, groups=groups, slots=slots)))}
    for temperature in TEMPERATURES:
        of_prompts = with_lengths(replay, parts, temperature)
        arms = {name: ARMS[name] for name in OF_PROMPTS} | {"skewness_model": with_model(of_prompts.deviation)}
        made = shares(asyncio.run(contest(of_prompts, arms, groups=groups, slots=slots)))
        found[f"two_engines_prompts_{temperature:g}"] = made
    return found


def sixteen_engines(workload: str, steps: int, parts: int) -> dict[str, dict[str, float]]:
    """The same on sixteen engines in virtual time; with SmolLM2's prompts of the first temperature."""
    setup = {"engines": 16, "slots": 64, "groups": 512}
    found = {"sixteen_engines": compare(workload, group_size=8, steps=steps, arms=list(ARMS), **setup)}
    trace = open_workload(workload).sample(steps=steps, groups=512, group_size=8, seed=0)
    of_prompts = with_lengths(Replay.of(trace), parts, TEMPERATURES[0])
    arms = {name: ARMS[name] for name in OF_PROMPTS} | {"skewness_model": with_model(of_prompts.deviation)}
    found["sixteen_engines_prompts"] = play(of_prompts, arms, model=MODELS[workload], **setup)
    return found


def main(
    rounds: int = 5, groups: int = 16, slots: int = 16, steps: int = 2, parts: int = 6, longest: int = LONGEST
) -> None:
    """Make all parts. `longest`: the tokens of the longest response on the two real engines."""
    logging.getLogger("tailrace").setLevel(logging.ERROR)
    decision_ms, move_ms = dispatch_ms(), asyncio.run(measured(7))
    recall = {f"{temperature:g}": recalls(parts, temperature) for temperature in TEMPERATURES}
    print(json.dumps({"recall": recall}), flush=True)
    real = two_engines(rounds, groups, slots, parts, longest)
    print(json.dumps(real), flush=True)
    virtual, of_prompts = {}, {}
    for workload in library():
        made = sixteen_engines(workload, steps, parts)
        virtual[workload], of_prompts[workload] = made["sixteen_engines"], made["sixteen_engines_prompts"]
        print(workload, made, flush=True)
    found = {
        "bench": "dispatch",
        **real,
        "sixteen_engines": virtual,
        "sixteen_engines_prompts": of_prompts,
        "lpt_over_fifo": {name: round(of["pull_lpt"] / of["pull"], 3) for name, of in virtual.items()},
        "redispatch_gain": {name: round(1 - of["oracle"] / of["oracle_unmoved"], 3) for name, of in virtual.items()},
        "recall": recall,
        "dispatch_ms": decision_ms,
        "move_ms": move_ms,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
