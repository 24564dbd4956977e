"""The pools of worker processes that an algorithm's table asks for."""

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_run_algorithm
from tailrace.algorithms.table import AddUp, Compute, Grade, Serve
from tailrace.config.cluster import ROLLOUT, PoolConfig, pool_in_table, pool_key, reward_pool
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, did_you_mean


def run_pools(config: RunConfig) -> dict[str, PoolConfig]:
    """The pools of a run by name, in the order of the table.

    Raises:
        ConfigError: a pool of the recipe is for no task or reward, or has several workers for a model that is trained.
    """
    algorithm = make_run_algorithm(config)
    kinds = algorithm.pools()
    for kind in config.cluster.pools:
        if kind not in kinds:
            raise ConfigError(
                f"cluster.pools.{kind} is for no task of the algorithm, whose tasks are in {', '.join(kinds)}"
                f"{did_you_mean(kind, kinds)}"
            )
    for reward in config.cluster.reward.pools:
        if reward not in config.rewards.graders:
            known = ", ".join(config.rewards.graders) or "none"
            raise ConfigError(
                f"{pool_key(reward_pool(reward))} is for no reward by name, and rewards.graders has {known}"
                f"{did_you_mean(reward, config.rewards.graders)}"
            )
    for task, _ in algorithm.trained():
        if (workers := config.cluster.pool(task.pool).workers) != 1:
            raise ConfigError(f"{pool_key(task.pool)} has {workers} workers, and one process trains a model; use 1")
    return {name: pool for kind in kinds for name, pool in config.cluster.named(kind).items()}


def check_whole_steps(config: RunConfig, controllers: int) -> None:
    """Check that one worker alone claims whole steps from several controllers. Of two, each could wait with a part.

    Raises:
        ConfigError: there are more.
    """
    if controllers == 1 or config.pipeline.placement != "separated":
        return
    for task in make_run_algorithm(config).tasks:
        workers = config.cluster.pool(task.pool).workers
        if isinstance(task.work, Compute) and task.work.of == "step" and workers > 1:
            raise ConfigError(
                f"{pool_key(task.pool)} has {workers} workers, whose task {task.name} claims whole steps, and the "
                f"queue has {controllers} controllers: each worker could wait with a part of a step; use 1 worker, or "
                "1 controller"
            )


def factory_of(algorithm: Algorithm, pool: str) -> str:
    """The name of the function that makes the pool's workers, for `WorkerSpec.factory`."""
    kind = pool_in_table(pool)
    if kind in {task.pool for task, _ in algorithm.other_models()}:
        name = "model:ModelWorker"
    else:
        name = {ROLLOUT: "rollout:RolloutWorker", "trainer": "trainer:TrainerWorker"}.get(kind, "base:RunWorker")
    return f"tailrace.run.workers.{name}"


def actor_of(pool: str) -> str:
    """The actor in the pool's activity events."""
    return "engine" if pool_in_table(pool) == ROLLOUT else pool


def uses_device(algorithm: Algorithm, pool: str) -> bool:
    """Whether the workers of the pool compute on the run's device."""
    works = [task.work for task in algorithm.tasks if task.pool == pool_in_table(pool)]
    return any(
        work.uses_device if isinstance(work, Serve) else not isinstance(work, Grade | AddUp | Compute) for work in works
    )


def device_workers(config: RunConfig) -> dict[str, int]:
    """The number of workers of each pool that computes on the run's device."""
    algorithm = make_run_algorithm(config)
    return {name: pool.workers for name, pool in run_pools(config).items() if uses_device(algorithm, name)}
