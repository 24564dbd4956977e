"""The pools of worker processes that an algorithm's table asks for."""

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Compute, Grade, Serve
from tailrace.config.cluster import PoolConfig, pool_key
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, did_you_mean


def run_pools(config: RunConfig) -> dict[str, PoolConfig]:
    """The pools of a run by kind, in the order of the table.

    Raises:
        ConfigError: `cluster.pools` has a pool without tasks, or several workers for a model that is trained.
    """
    algorithm = make_algorithm(config.algorithm)
    kinds = algorithm.pools()
    for kind in config.cluster.pools:
        if kind not in kinds:
            raise ConfigError(
                f"cluster.pools.{kind} is for no task of the algorithm, whose tasks are in {', '.join(kinds)}"
                f"{did_you_mean(kind, kinds)}"
            )
    for task, _ in algorithm.trained():
        if (workers := config.cluster.pool(task.pool).workers) != 1:
            raise ConfigError(f"{pool_key(task.pool)} has {workers} workers, and one process trains a model; use 1")
    return {kind: config.cluster.pool(kind) for kind in kinds}


def factory_of(algorithm: Algorithm, kind: str) -> str:
    """The name of the function that makes the pool's workers, for `WorkerSpec.factory`."""
    if kind in {task.pool for task, _ in algorithm.other_models()}:
        name = "model:ModelWorker"
    else:
        name = {"rollout": "rollout:RolloutWorker", "trainer": "trainer:TrainerWorker"}.get(kind, "base:RunWorker")
    return f"tailrace.run.workers.{name}"


def actor_of(kind: str) -> str:
    """The actor in the pool's activity events."""
    return "engine" if kind == "rollout" else kind


def uses_device(algorithm: Algorithm, kind: str) -> bool:
    """Whether the workers of the pool compute on the run's device."""
    works = [task.work for task in algorithm.tasks if task.pool == kind]
    return any(work.uses_device if isinstance(work, Serve) else not isinstance(work, Grade | Compute) for work in works)


def device_workers(config: RunConfig) -> dict[str, int]:
    """The number of workers of each pool that computes on the run's device."""
    algorithm = make_algorithm(config.resolved_algorithm)
    kinds = algorithm.pools()
    return {kind: config.cluster.pool(kind).workers for kind in kinds if uses_device(algorithm, kind)}
