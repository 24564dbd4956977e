"""A recipe as it is: the candidate that it describes itself.

    rollout pools ──`places`──▶ pools of the cluster ──▶ engines, each pool's with its own TP, DP, batch and cache
    trainer       ──`places`──▶ all devices of its pool that are left, in the quickest arrangement that fits
    critic        on devices of the trainer's pool: its `gpus`, or a part with which the two train as quickly as can be

All else that a plan chooses is taken from the recipe.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tailrace.config.base import GIB
from tailrace.config.cluster import ROLLOUT, pool_key
from tailrace.config.engine import EngineConfig, NativeEngineConfig, VllmEngineConfig
from tailrace.errors import PlanError, counted
from tailrace.planner.candidates import Candidate, Candidates
from tailrace.planner.modes import Mode
from tailrace.planner.places import rollout_place, trainer_place
from tailrace.planner.problem import Problem
from tailrace.planner.trainings import Training, offloaded, sizes
from tailrace.planning.allocation import Allocation, Engines
from tailrace.planning.hardware.base import Pool
from tailrace.planning.step_times.generation import ELEMENT_BYTES
from tailrace.planning.step_times.training_setup import Layout
from tailrace.simulator.setup import engines_like

_PLAYED = 8
"""Of the trainers that are the quickest on mean batches, so many are compared on the drawn ones: lengths differ, and so
ranks wait for each other."""


def given(problem: Problem) -> Candidate:
    """Return the candidate of a recipe.

    Raises:
        PlanError: it is not clear where a pool stands, a worker does not fit, or there are too few devices.
    """
    return with_allocation(problem, _colocated(problem) if _is_colocated(problem) else _separated(problem))


def with_allocation(problem: Problem, allocation: Allocation) -> Candidate:
    """Return the candidate of a recipe with such devices."""
    config = problem.config
    return Candidates(problem).of_allocation(
        Mode.of(config.pipeline), allocation, config.trainer.micro_batch_tokens, config.grading_places
    )


def _is_colocated(problem: Problem) -> bool:
    return problem.config.pipeline.placement == "colocated"


def _colocated(problem: Problem) -> Allocation:
    """Engines and a trainer on all devices, in turns."""
    pool, *others = problem.cluster.pools
    if others:
        raise PlanError(
            "pipeline.placement colocated has engines and trainer on the same devices, and the cluster has pools of "
            f"{' and '.join(one.name for one in problem.cluster.pools)}; give a cluster of one, or "
            "pipeline.placement=separated"
        )
    engines = _like(problem, ROLLOUT, pool)
    if engines.devices > pool.devices:
        raise PlanError(
            f"an engine takes {counted(engines.devices, 'device')}, engine.tp {engines.tp} times engine.dp "
            f"{engines.dp}, and there are {pool.devices} {pool.kind}; use fewer for each, or a larger cluster"
        )
    engines = replace(engines, engines=pool.devices // engines.devices)
    space, needed = Candidates(problem), _needed(problem, engines)
    rooms = [(space.room_beside(engines, one), one) for one in _trainings(problem, pool, pool.devices)]
    (room, reference, critic), training = next(
        (each for each in rooms if each[0][0] >= needed), max(rooms, key=lambda each: each[0][0])
    )
    beside = " and its trainer" if problem.critic is None else ", its trainer and its critic"
    return Allocation(
        rollout=(_cached(problem, engines, room, beside=beside),),
        trainer=pool,
        layout=training.layout,
        reference=reference,
        critic=None if critic is None else critic.layout,
        colocated=True,
    )


def _separated(problem: Problem) -> Allocation:
    """The recipe's engines, and a trainer on what is left."""
    config, cluster = problem.config, problem.cluster
    trainer = trainer_place(cluster, config.cluster)
    rollout = tuple(_rollout(problem, trainer))
    reference = None
    if problem.table.reference:
        reference = replace(_alone(problem, trainer), dp=config.cluster.reference.workers)
    for pool in {one.pool.name: one.pool for one in rollout}.values():
        _check_devices([one for one in rollout if one.pool is pool], pool, int(pool is trainer))
    left = trainer.devices - sum(one.devices for one in rollout if one.pool is trainer)
    if reference is not None and (left := left - reference.devices) < 1:
        raise PlanError(
            f"{counted(reference.dp, 'worker')} of the reference, of {reference.tp} {trainer.kind} each, would leave "
            "none for the trainer; change cluster.reference.workers, or use a larger cluster"
        )
    critic = _critic(problem, trainer, left)
    each = [one.layout for one in _trainings(problem, trainer, left - (0 if critic is None else critic.devices))]
    layout = next(one for one in each if critic is None or one.checkpointing == critic.checkpointing)
    return Allocation(rollout=rollout, trainer=trainer, layout=layout, reference=reference, critic=critic)


def _critic(problem: Problem, pool: Pool, free: int) -> Layout | None:
    """The arrangement of the critic, where there is one, on a part of the free devices; the trainer has the others.

    Raises:
        PlanError: there are too few devices for both, or the two do not fit.
    """
    space, task = Candidates(problem), problem.table.critic
    if space.critic is None or task is None:
        return None
    own = int(problem.config.cluster.pool(task.pool).gpus)
    if free < (needed := max(2, own + 1)):
        raise PlanError(
            f"trainer and critic take {needed} devices at least, and engines leave {free} {pool.kind}; change "
            f"{pool_key(task.pool)}.gpus or {pool_key(ROLLOUT)}.workers, or use a larger cluster"
        )
    tokens, streaming = problem.config.trainer.micro_batch_tokens, problem.config.pipeline.streaming
    found: list[tuple[float, Layout]] = []
    for devices in [own] if own else sizes(pool, free - 1):
        for training in space.trainer.quickest_of(pool, free - devices, tokens, streaming=streaming):
            if critics := space.critic.alike(pool, devices, training):
                critic = min(critics, key=lambda one: one.seconds(streaming=streaming))
                seconds = max(one.seconds(streaming=streaming) for one in (training, critic))
                found.append((seconds, critic.layout))
                break
    if not found:
        raise PlanError(
            f"the trainer of {problem.shape.name} and the critic do not fit on {counted(free, pool.kind)} together; "
            f"change {pool_key(task.pool)}.gpus, or use a larger cluster"
        )
    return min(found, key=lambda one: one[0])[1]


def _alone(problem: Problem, pool: Pool) -> Layout:
    """The arrangement of a replica of the reference: on the fewest devices on which it fits.

    Raises:
        PlanError: it fits nowhere in a node.
    """
    each = Candidates(problem).reference_layouts(pool, problem.config.trainer.micro_batch_tokens)
    layout, memory = next((one for one in each if one[1].fits(pool.device)), each[-1])
    memory.check(pool.device, f"each of {layout.tp} {pool.kind}")
    return layout


def _rollout(problem: Problem, trainer: Pool) -> Iterator[Engines]:
    """The engines of each pool that has some."""
    config = problem.config.cluster
    for name, own in config.rollout.each.items():
        if own.workers:
            like = _like(problem, name, rollout_place(problem.cluster, name, config, trainer))
            engines = _cached(problem, like, like.room(problem.shape))
            yield replace(engines, engines=own.workers, most=own.most if own.is_elastic else None)


def _trainings(problem: Problem, pool: Pool, devices: int) -> list[Training]:
    """The trainers on so many devices that fit, the quickest first.

    Raises:
        PlanError: none fits; the message says by how much the nearest one does not.
    """
    trainings, tokens = Candidates(problem).trainer, problem.config.trainer.micro_batch_tokens
    streaming = problem.config.pipeline.streaming
    quick = trainings.quickest_of(pool, devices, tokens, streaming=streaming)
    if not quick:
        arrangements = list(trainings.layouts(pool, devices))
        each = [trainings.training(pool, layout, tokens) for layout in (*arrangements, *offloaded(arrangements))]
        min(each, key=lambda one: one.memory.peak).memory.check(pool.device, f"each of {devices} {pool.kind}")
    first, rest = quick[:_PLAYED], quick[_PLAYED:]
    return [*sorted(first, key=lambda one: trainings.played_s(one, streaming=streaming)), *rest]


def _check_devices(engines: Sequence[Engines], pool: Pool, needed: int) -> None:
    """Check that a pool has devices for engines, and so many more for the trainer.

    Raises:
        PlanError: it has not.
    """
    taken = sum(one.devices for one in engines)
    if taken + needed <= pool.devices:
        return
    each = " and ".join(
        f"{counted(one.most_engines, 'engine')} of {counted(one.tp * one.dp, 'device')}" for one in engines
    )
    keys = ", ".join(f"{pool_key(one.name)}.{'workers' if one.most is None else 'max_workers'}" for one in engines)
    leaves = f", which leaves {max(0, pool.devices - taken)} for the trainer" if needed else ""
    take = "takes" if len(engines) == 1 and engines[0].most_engines == 1 else "take"
    raise PlanError(
        f"{each} {take} {taken} of {pool.devices} {pool.kind}{leaves}; change {keys}, engine.tp or engine.dp"
    )


def _like(problem: Problem, name: str, pool: Pool) -> Engines:
    """An engine of a recipe's pool, on a pool of the cluster, without a cache."""
    engine = problem.config.engines[name]
    tp, dp = (engine.tp, engine.dp) if isinstance(engine, NativeEngineConfig) else (1, 1)
    return engines_like(problem.config, name, pool, tp=tp, dp=dp)


def _needed(problem: Problem, like: Engines) -> float:
    """Tokens that the cache of an engine has at least: the recipe's, or else the longest sample."""
    held = _cache_gib(problem.config.engines[like.name])
    longest = float(problem.load.batches.longest)
    return longest if held is None else max(longest, held * GIB / _token_bytes(problem, like))


def _token_bytes(problem: Problem, like: Engines) -> float:
    return problem.shape.cache_bytes(tp=like.tp, element_bytes=ELEMENT_BYTES[like.dtype])


def _cached(problem: Problem, like: Engines, room: float, *, beside: str = "") -> Engines:
    """An engine with the recipe's cache, or else with all that there is room for.

    `beside`: what else has its devices, for messages.

    Raises:
        PlanError: the device has no room for its weights and its cache, or the cache none for the longest sample.
    """
    name, kind, tp = problem.shape.name, like.pool.kind, like.tp
    if room <= 0:
        raise PlanError(f"an engine of {name}{beside} with TP {tp} does not fit on {kind}; raise its TP degree")
    held = _cache_gib(problem.config.engines[like.name])
    cache = room if held is None else held * GIB / _token_bytes(problem, like)
    key = "engine" if like.name == ROLLOUT else f"{pool_key(like.name)}.engine"
    if cache > room:
        left = room * _token_bytes(problem, like) / GIB
        raise PlanError(
            f"{key}.kv_cache_gib is {held:g}, and {kind} has room for {left:.1f} beside {name}{beside} with TP {tp}; "
            f"lower it, or raise {key}.tp"
        )
    if cache < (longest := problem.load.batches.longest):
        raise PlanError(
            f"the cache of an engine of {name}{beside} with TP {tp} on {kind} holds {cache:,.0f} tokens, and the "
            f"longest sample has {longest:,}; raise {key}.{'tp' if held is None else 'kv_cache_gib'}"
        )
    return replace(like, cache_tokens=cache)


def _cache_gib(engine: EngineConfig) -> float | None:
    """GiB of the cache on each rank, where the recipe gives them; by default it has what memory is left."""
    given_here = isinstance(engine, NativeEngineConfig | VllmEngineConfig) and "kv_cache_gib" in engine.model_fields_set
    return engine.kv_cache_gib if given_here else None  # type: ignore[union-attr]
