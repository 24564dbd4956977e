"""Simulates 100 steps of 8,192 samples on 1,024 H100, on one core: the seconds and the memory that this takes.

    python benchmarks/simulator_scale.py [--steps 100]

Qwen2.5-7B, GRPO with groups of 8, one step ahead, half of the devices generate the lengths of math-32b. The whole
counts: drawing the lengths, making the scenario, and the run. The last line is JSON.
"""

import json
import os
import resource
import time
from dataclasses import replace

import typer

from tailrace.config.cluster import ROLLOUT
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.host.cpu import usable_cores
from tailrace.planning.allocation import Allocation, best_layout, mean_batches
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.setup import engines_like, scenario_of
from tailrace.simulator.summary import Summing
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

DEVICES, SAMPLES, GROUP = 1024, 8192, 8
GIB = 2**30


def recipe() -> RunConfig:
    """The recipe that is simulated."""
    return load_config(
        {
            "output_dir": "unused",
            "device": "cuda",
            "model": {"path": "Qwen2.5-7B"},
            "prompts": {"source": {"type": "jsonl", "path": "unused"}},
            "rewards": {"grader": {"type": "regex", "pattern": "."}, "workers": 256},
            "algorithm": {"type": "grpo", "group_size": GROUP},
            "sampling": {"max_new_tokens": 32_768},
            "trainer": {"train_batch_size": SAMPLES, "micro_batch_tokens": 16_384},
            "pipeline": {"placement": "separated", "max_staleness": 1, "streaming": True},
            "queue": {"type": "service", "max_rows": 4 * SAMPLES},
        }
    )


def simulate(steps: int) -> dict[str, float]:
    """Simulate, and return the seconds, the memory and what was found."""
    os.sched_setaffinity(0, usable_cores()[:1])
    start = time.perf_counter()
    config, shape, cluster = recipe(), find_shape("Qwen2.5-7B"), open_cluster(f"{DEVICES}xH100")
    trace = open_workload("math-32b").sample(steps=steps, groups=SAMPLES // GROUP, group_size=GROUP, seed=0)
    replay, (pool,) = Replay.of(trace), cluster.pools
    groups = [(group[0].prompt_tokens, [script.tokens for script in group]) for group in replay.groups]
    tokens = config.trainer.micro_batch_tokens
    batches = mean_batches(groups, groups_per_step=config.groups_per_step, micro_batch_tokens=tokens)
    layout, _ = best_layout(shape, pool, DEVICES // 2, batches)
    like = engines_like(config, ROLLOUT, pool, engines=DEVICES // 2)
    engines = replace(like, cache_tokens=like.room(shape))
    allocation = Allocation(rollout=(engines,), trainer=pool, layout=layout)
    summing = Summing(1)
    scenario = scenario_of(config, shape, cluster, allocation, steps=steps)
    run = SimulatedRun(scenario, replay, sinks=(summing,), samples=False)
    run.run()
    summary = summing.summary(preemptions=0)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (GIB / 1024), 2),
        "steps": steps,
        "samples": steps * SAMPLES,
        "simulated_step_s": round(summary.step_s, 2),
    }


def main(steps: int = 100) -> None:
    """Simulate, and print what it took."""
    print(json.dumps({"bench": "simulator_scale", "devices_1024": simulate(steps)}))


if __name__ == "__main__":
    typer.run(main)
