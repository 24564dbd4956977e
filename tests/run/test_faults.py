"""Runs of every mode that lose a process of every kind at seeded moments.

Each run ends by itself, and has trained on every row once.
"""

from pathlib import Path
from typing import Any

import pytest

from tailrace.cluster.local import LocalCluster
from tailrace.config.algorithm import AdaptiveKl
from tailrace.events import read_events
from tailrace.planning.kl_control import next_coefficient
from tests.conftest import TinyModel
from tests.helpers.effort import LONG
from tests.helpers.faulty_run import KINDS, Faults, rows_of_steps, run
from tests.helpers.runs import small_run, steps_of, write_prompts

MODES: list[tuple[dict[str, Any], str]] = [
    ({}, "synchronous"),
    ({"streaming": True}, "in_flight"),
    ({"max_staleness": 1}, "delayed"),
    ({"max_staleness": 2, "streaming": True}, "sub_step"),
]
ALGORITHMS: list[dict[str, Any]] = [{"type": "grpo"}, {"type": "dapo", "dynamic_sampling": {"max_attempts": 3}}]
"""DAPO throws about a third of its groups away with this grader, and has other prompts in their places."""
SEEDS = range(4) if LONG else (1, 2)
"""The seeds of runs with workers in this process, one for each mode; every second one has DAPO."""
SEEDS_OF_PROCESSES = (135,)
"""The seeds of runs with worker processes, which take long to start."""
STEPS = 5
ADAPTIVE = AdaptiveKl(target=1e-4)
POOLS = ("rollout", "trainer", "reward", "reference")


def survive(directory: Path, model: Path, seed: int, local: list[LocalCluster] | None) -> None:
    pipeline, mode = MODES[seed % len(MODES)]
    algorithm = ALGORITHMS[seed % len(ALGORITHMS)]
    pools: dict[str, Any] = {kind: {"cpus": 0} for kind in POOLS}
    config = small_run(
        directory / "run",
        model,
        write_prompts(directory / "prompts.jsonl"),
        pipeline={"placement": "separated", **pipeline},
        weights={"mode": mode},
        cluster={**pools, "rollout": {"cpus": 0, "workers": 2}, "heartbeat_limit_s": 8.0},
        queue={"type": "service", "units": 2, "replicas": 2},
        trainer__steps=STEPS,
        algorithm={"group_size": 4, "kl": {"coefficient": 0.01, "adaptive": ADAPTIVE.model_dump()}, **algorithm},
        rewards__grader={"type": "function", "path": "tests.helpers.graders.one_in_four"},
    )
    faults = Faults(seed, local=local)
    assert run(config, faults) == 0
    assert len(faults.done) == len(KINDS), f"done: {faults.done}, not done: {faults.plan}"
    rows = rows_of_steps(directory / "run")
    assert sorted(rows) == list(range(STEPS)), faults.done
    assert sorted(order for step in rows.values() for order in step) == list(range(8 * STEPS)), faults.done
    last = {event.step: event for event in steps_of(directory / "run")}
    assert all(e.metrics["staleness_max"] <= pipeline.get("max_staleness", 0) for e in last.values()), faults.done
    after = [0.01]
    for step in range(STEPS):
        after.append(next_coefficient(after[-1], last[step].metrics["ref_kl"], ADAPTIVE))
    lag = pipeline.get("max_staleness", 0)
    coefficients = [last[step].metrics["kl_coefficient"] for step in range(STEPS)]
    assert coefficients == pytest.approx([after[max(0, step - lag)] for step in range(STEPS)], rel=1e-5), faults.done
    events = list(read_events(directory / "run" / "events.jsonl"))
    # those of an attempt that the trainer's death has ended count in no step
    remade = sum(event.metrics.get("remade_groups", 0.0) for event in events if event.task == "advantage")
    assert bool(remade) == (algorithm["type"] == "dapo"), faults.done
    died = {event.actor for event in events if event.task == "worker_died"}
    assert "trainer" in died, faults.done  # the trainer's death may end the attempt before other deaths are heard of


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_survives_deaths_at_any_moment(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    made: list[LocalCluster] = []

    def make_cluster(config: Any, _: Any) -> LocalCluster:
        made.append(LocalCluster(config))
        return made[-1]

    monkeypatch.setattr("tailrace.run.separated.make_cluster", make_cluster)
    survive(tmp_path, tiny_model("llama"), seed, made)


@pytest.mark.parametrize("seed", SEEDS_OF_PROCESSES)
def test_a_run_survives_processes_that_are_killed_or_stopped_at_any_moment(
    tmp_path: Path, tiny_model: TinyModel, connected_to_ray: None, seed: int
) -> None:
    survive(tmp_path, tiny_model("llama"), seed, None)
