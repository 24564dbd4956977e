"""A plan under another recipe, cluster or workload."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tailrace.errors import PlanError
from tailrace.planner.candidates import Candidate, Candidates
from tailrace.planner.problem import Problem
from tailrace.planner.search import Plans
from tailrace.planner.trial import Plan, simulate
from tailrace.planning.allocation import Allocation
from tailrace.planning.hardware.base import Cluster, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan, and what became of it."""

    change: str
    plan: Plan | None
    """None where nothing fits."""
    searched: bool
    """Whether the allocation does not fit any more, so that another one was searched for."""
    why: str = ""
    """Why nothing fits."""


def what_if(
    plan: Plan, problem: Problem, change: str, given: Mapping[str, Any], search: Callable[[Problem], Plans]
) -> Comparison:
    """Simulate the allocation of a plan for another problem.

    Args:
        change: what the problem differs by, as it was asked for.
        given: the keys of the recipe that were changed; those of `pipeline`, and micro-batches, replace the plan's.
        search: plans anew, where the allocation does not fit.
    """
    candidate = _moved(plan.candidate, problem, given)
    if candidate is not None:
        return Comparison(change=change, plan=simulate(problem, candidate), searched=False)
    try:
        return Comparison(change=change, plan=search(problem).best, searched=True)
    except PlanError as error:
        return Comparison(change=change, plan=None, searched=True, why=str(error))


def _moved(candidate: Candidate, problem: Problem, given: Mapping[str, Any]) -> Candidate | None:
    """The candidate with the devices and keys of another problem; None where it does not fit there."""
    allocation = candidate.allocation
    generates = _pool(problem.cluster, candidate.engines.pool)
    trainer = _pool(problem.cluster, allocation.trainer)
    if generates is None or trainer is None:
        return None
    pipeline = given.get("pipeline") or {}
    mode = replace(candidate.mode, **{key: value for key, value in pipeline.items() if key in candidate.mode.values})
    same = replace(
        allocation, rollout=(replace(candidate.engines, pool=generates),), trainer=trainer, colocated=mode.colocated
    )
    if mode.colocated != allocation.colocated or not _has_room(same):
        return None
    tokens = (given.get("trainer") or {}).get("micro_batch_tokens", candidate.micro_batch_tokens)
    candidates = Candidates(problem)
    found = candidates.placed(mode, same, tokens)
    if found is None or not _has_room(found.allocation):  # such as for a reference, which the plan had not
        return None
    if not _gives_graders(given):
        return found
    return candidates.of_allocation(mode, found.allocation, tokens, problem.config.grading_places)


def _gives_graders(given: Mapping[str, Any]) -> bool:
    """Whether keys of a recipe say how many processes grade."""
    rewards, pool = given.get("rewards") or {}, (given.get("cluster") or {}).get("reward") or {}
    each = (rewards, *(rewards.get("graders") or {}).values(), pool, *(pool.get("pools") or {}).values())
    return any("workers" in one for one in each)


def _pool(cluster: Cluster, pool: Pool) -> Pool | None:
    """The pool of the same name, or the only one; None where several others are there."""
    named = [one for one in cluster.pools if one.name == pool.name]
    return next(iter(named or cluster.pools)) if named or len(cluster.pools) == 1 else None


def _has_room(allocation: Allocation) -> bool:
    (engines,), trainer = allocation.rollout, allocation.trainer
    rollout = engines.pool
    if rollout.name == trainer.name:
        return allocation.devices <= rollout.devices
    return allocation.rollout_devices <= rollout.devices and allocation.trainer_devices <= trainer.devices
