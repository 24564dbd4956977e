"""Small problems to plan for."""

from typing import Any

from tailrace.config.load import parse_as
from tailrace.config.overrides import merged, override_values
from tailrace.config.run import RunConfig
from tailrace.planner.problem import Problem
from tailrace.planning.hardware.base import Cluster
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.workloads.samplers.factory import open_workload

VALUES: dict[str, Any] = {
    "output_dir": "runs/planned",
    "device": "cuda",
    "prompts": {"source": {"type": "jsonl", "path": "prompts.jsonl"}},
    "rewards": {"grader": {"type": "exact"}},
    "algorithm": {"type": "grpo", "group_size": 4},
    "sampling": {"max_new_tokens": 16384},
    "trainer": {"train_batch_size": 64},
}

PPO = "algorithm={type: ppo, group_size: 4}"
"""The override for an algorithm with a critic."""


def config_of(*overrides: str) -> RunConfig:
    """A recipe that leaves the mode open."""
    values = VALUES
    for override in overrides:
        values = merged(values, override_values(override))
    return parse_as(RunConfig, values, source="test")


def problem_of(
    cluster: str | Cluster = "4xH100",
    *overrides: str,
    model: str = "Qwen2.5-1.5B",
    workload: str = "math-32b",
    steps: int = 1,
) -> Problem:
    """A problem whose step times are analytic, with or without kernel tables."""
    shape = find_shape(model)
    return Problem.of(
        config_of(*overrides),
        shape,
        open_cluster(cluster) if isinstance(cluster, str) else cluster,
        open_workload(workload),
        steps=steps,
        times=lambda pool: AnalyticStepTimes(shape, pool),
    )
