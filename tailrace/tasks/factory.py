"""From a task of an algorithm's table to what serves it."""

import inspect

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.table import Compute, Generate, Grade, Score, Serve, TableTask, Train
from tailrace.errors import AlgorithmError
from tailrace.tasks.base import Service
from tailrace.tasks.compute import ComputeTask
from tailrace.tasks.context import TaskContext
from tailrace.tasks.reward import RewardTask


async def make_services(algorithm: Algorithm, pool: str, context: TaskContext) -> list[Service]:
    """What serves the tasks of `pool`, but the one that trains, which the main loop drives.

    Raises:
        TailraceError: one cannot be made.
    """
    tasks = [task for task in algorithm.tasks if task.pool == pool and not isinstance(task.work, Train)]
    return [await _make(task, context) for task in tasks]


async def _make(task: TableTask, context: TaskContext) -> Service:
    samples = context.samples_per_step
    common = (task.name, context.queue, context.log, context.activity)
    match task.work:
        case Generate():
            return _rollout(task, context)
        case Grade():
            graders = await context.grader_pool()
            return RewardTask(*common, graders, context.config.rewards, samples_per_step=samples)
        case Score():
            from tailrace.tasks.scoring import ScoringTask  # seconds: only where something is scored

            score = await context.scorer(task.work.of)
            version = 0 if task.work.of is None else None
            return ScoringTask(*common, score, task.writes[0], samples_per_step=samples, version=version)
        case Compute():
            return ComputeTask(*common, task.work, samples_per_step=samples)
        case Serve():
            return await _own(task, task.work, context)
        case _:
            raise AssertionError(f"task {task.name!r} has the work {task.work}, which the main loop drives")


def _rollout(task: TableTask, context: TaskContext) -> Service:
    from tailrace.tasks.rollout import RolloutTask  # seconds: only where something is generated

    config, generation = context.config, context.generation
    assert generation is not None, "only the pool with the engine has a task that generates"
    return RolloutTask(
        task.name,
        context.queue,
        generation.engine,
        config.sampling,
        generation.decode,
        context.log,
        context.activity,
        samples_per_step=context.samples_per_step,
        group_size=config.algorithm.group_size,
        room=generation.room,
        max_staleness=config.pipeline.max_staleness,
        gate=generation.gate,
    )


async def _own(task: TableTask, work: Serve, context: TaskContext) -> Service:
    service = work.make(context, task)
    if inspect.isawaitable(service):
        service = await service
    if not inspect.iscoroutinefunction(getattr(service, "run", None)):
        raise AlgorithmError(
            f"task {task.name!r} of the algorithm made a {type(service).__name__}; it must make an object with "
            "`async def run(self)`"
        )
    return service  # type: ignore[no-any-return]
