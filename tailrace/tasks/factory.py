"""Makes the services for the tasks of an algorithm's table."""

import inspect

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.table import AddUp, Compute, Generate, Grade, Score, Serve, TableTask, Train
from tailrace.errors import AlgorithmError
from tailrace.host.user_code import making
from tailrace.rewards.pool import capacity_of
from tailrace.tasks.base import Service
from tailrace.tasks.compute import ComputeTask
from tailrace.tasks.context import TaskContext
from tailrace.tasks.reward import RewardTask, SumTask


async def make_services(algorithm: Algorithm, pool: str, context: TaskContext) -> list[Service]:
    """Make the services for the tasks of `pool`, except the one that generates, and the ones that train.

    The first is made with the generation service (run/generation.py); the main loop drives the others.

    Raises:
        TailraceError: a service cannot be made.
    """
    tasks = [task for task in algorithm.tasks if task.pool == pool and not isinstance(task.work, Generate | Train)]
    return [await _make(task, context) for task in tasks]


async def _make(task: TableTask, context: TaskContext) -> Service:
    match task.work:
        case Grade() if context.config.pipeline.replay is not None:
            from tailrace.tasks.replay import ReplayRewardTask, load_replay

            replay = load_replay(context.config.pipeline.replay)
            assert replay is not None
            return ReplayRewardTask(context, task.name, replay, workers=await capacity_of(context.config.rewards))
        case Grade(reward):
            return RewardTask(context, task.name, await context.grader_pool(reward), reward)
        case AddUp():
            return SumTask(context, task.name)
        case Score():
            from tailrace.tasks.scoring import ScoringTask  # slow: only where something is scored

            version = 0 if task.work.of is None else None
            score = await context.scorer(task.work.of)
            return ScoringTask(context, task.name, score, task.writes[0], version=version)
        case Compute():
            return ComputeTask(context, task.name, task.work)
        case Serve():
            return await _own(task, task.work, context)
        case _:
            raise AssertionError(f"task {task.name!r} has the work {task.work}, which is not made here")


async def _own(task: TableTask, work: Serve, context: TaskContext) -> Service:
    with making(f"the service of task {task.name!r}", AlgorithmError):
        service = work.make(context, task)
        if inspect.isawaitable(service):
            service = await service
    if not inspect.iscoroutinefunction(getattr(service, "run", None)):
        raise AlgorithmError(
            f"task {task.name!r} of the algorithm made a {type(service).__name__}; it must make an object with "
            "`async def run(self)`"
        )
    return service  # type: ignore[no-any-return]
