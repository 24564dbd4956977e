"""A recipe as it is: the candidate that it describes itself.

    rollout pools ──`places`──▶ pools of the cluster ──▶ engines, each pool's with its own TP, DP, batch and cache
    trainer       ──`places`──▶ all devices of its pool that are left, in the quickest arrangement that fits

All else that a plan chooses is taken from the recipe.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tailrace.config.base import GIB
from tailrace.config.cluster import ROLLOUT, pool_key
from tailrace.config.engine import EngineConfig, NativeEngineConfig, VllmEngineConfig
from tailrace.errors import PlanError
from tailrace.planner.candidates import Candidate, Candidates
from tailrace.planner.modes import Mode
from tailrace.planner.places import rollout_place, trainer_place
from tailrace.planner.problem import Problem
from tailrace.planning.allocation import Allocation, Engines, best_layout, engine_tokens
from tailrace.planning.hardware.base import Pool
from tailrace.planning.step_times.training_setup import Layout
from tailrace.simulator.setup import PREFILL_TOKENS, slots_of


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
        Mode.of(config.pipeline), allocation, config.trainer.micro_batch_tokens, config.rewards.least_workers
    )


def _is_colocated(problem: Problem) -> bool:
    return problem.config.pipeline.placement == "colocated"


def _colocated(problem: Problem) -> Allocation:
    """Engines and a trainer on all devices, in turns."""
    pool, *others = problem.cluster.pools
    if others:
        raise PlanError(
            "pipeline.placement colocated has engines and trainer on the same devices, and the cluster has pools of "
            f"{' and '.join(one.name for one in problem.cluster.pools)}; give a cluster of one"
        )
    engines = _engines(problem, ROLLOUT, pool)
    if engines.devices > pool.devices:
        raise PlanError(
            f"an engine takes {_counted(engines.devices, 'device')}, engine.tp {engines.tp} times engine.dp "
            f"{engines.dp}, and there are {pool.devices} {pool.kind}; use fewer for each, or a larger cluster"
        )
    engines = replace(engines, engines=pool.devices // engines.devices)
    reference = Layout(dp=pool.devices) if problem.table.reference else None
    return _allocation(problem, (engines,), pool, pool.devices, reference, colocated=True)


def _separated(problem: Problem) -> Allocation:
    """The recipe's engines, and a trainer on what is left."""
    config, cluster = problem.config, problem.cluster
    trainer = trainer_place(cluster, config.cluster)
    rollout = tuple(_rollout(problem, trainer))
    reference = None
    if problem.table.reference:
        alone = Candidates(problem).reference_layout(trainer, config.trainer.micro_batch_tokens)
        reference = replace(alone, dp=config.cluster.reference.workers)
    for pool in {one.pool.name: one.pool for one in rollout}.values():
        _check_devices([one for one in rollout if one.pool is pool], pool, int(pool is trainer))
    left = trainer.devices - sum(one.devices for one in rollout if one.pool is trainer)
    if reference is not None and (left := left - reference.devices) < 1:
        raise PlanError(
            f"{_counted(reference.dp, 'worker')} of the reference, of {reference.tp} {trainer.kind} each, would leave "
            "none for the trainer; change cluster.reference.workers, or use a larger cluster"
        )
    return _allocation(problem, rollout, trainer, left, reference)


def _rollout(problem: Problem, trainer: Pool) -> Iterator[Engines]:
    """The engines of each pool that has some."""
    config = problem.config.cluster
    for name, own in config.rollout.each.items():
        if own.workers:
            engines = _engines(problem, name, rollout_place(problem.cluster, name, config, trainer))
            yield replace(engines, engines=own.workers, most=own.most if own.is_elastic else None)


def _allocation(
    problem: Problem,
    rollout: tuple[Engines, ...],
    trainer: Pool,
    devices: int,
    reference: Layout | None,
    *,
    colocated: bool = False,
) -> Allocation:
    """An allocation whose trainer has so many devices."""
    batches = replace(problem.load.batches, micro_batch_tokens=problem.config.trainer.micro_batch_tokens)
    layout, _ = best_layout(problem.shape, trainer, devices, batches)
    return Allocation(rollout=rollout, trainer=trainer, layout=layout, reference=reference, colocated=colocated)


def _check_devices(engines: Sequence[Engines], pool: Pool, needed: int) -> None:
    """Check that a pool has devices for engines, and so many more for the trainer.

    Raises:
        PlanError: it has not.
    """
    taken = sum(one.devices for one in engines)
    if taken + needed <= pool.devices:
        return
    each = " and ".join(
        f"{_counted(one.most_engines, 'engine')} of {_counted(one.tp * one.dp, 'device')}" for one in engines
    )
    keys = ", ".join(f"{pool_key(one.name)}.{'workers' if one.most is None else 'max_workers'}" for one in engines)
    leaves = f", which leaves {max(0, pool.devices - taken)} for the trainer" if needed else ""
    take = "takes" if len(engines) == 1 and engines[0].most_engines == 1 else "take"
    raise PlanError(
        f"{each} {take} {taken} of {pool.devices} {pool.kind}{leaves}; change {keys}, engine.tp or engine.dp"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _engines(problem: Problem, name: str, pool: Pool) -> Engines:
    """An engine of a recipe's pool, on a pool of the cluster.

    Raises:
        PlanError: the device has no room for its weights and its cache, or the cache none for the longest sample.
    """
    engine, shape = problem.config.engines[name], problem.shape
    tp, dp = (engine.tp, engine.dp) if isinstance(engine, NativeEngineConfig) else (1, 1)
    slots = slots_of(engine)
    room = engine_tokens(shape, pool, tp=tp, step_tokens=PREFILL_TOKENS, slots=slots)
    if room <= 0:
        raise PlanError(f"an engine of {shape.name} with TP {tp} does not fit on {pool.kind}; raise its TP degree")
    held = _cache_gib(engine)
    cache = room if held is None else held * GIB / shape.cache_bytes(tp=tp)
    key, longest = "engine" if name == ROLLOUT else f"{pool_key(name)}.engine", problem.load.batches.longest
    if cache > room:
        left = room * shape.cache_bytes(tp=tp) / GIB
        raise PlanError(
            f"{key}.kv_cache_gib is {held:g}, and {pool.kind} has room for {left:.1f} beside {shape.name} with TP "
            f"{tp}; lower it, or raise {key}.tp"
        )
    if cache < longest:
        raise PlanError(
            f"the cache of an engine of {shape.name} with TP {tp} on {pool.kind} holds {cache:,.0f} tokens, and the "
            f"longest sample has {longest:,}; raise {key}.{'tp' if held is None else 'kv_cache_gib'}"
        )
    return Engines(name=name, pool=pool, engines=1, tp=tp, dp=dp, slots=slots, cache_tokens=cache)


def _cache_gib(engine: EngineConfig) -> float | None:
    """GiB of the cache on each rank, where the recipe gives them; by default it has what memory is left."""
    given_here = isinstance(engine, NativeEngineConfig | VllmEngineConfig) and "kv_cache_gib" in engine.model_fields_set
    return engine.kv_cache_gib if given_here else None  # type: ignore[union-attr]
