"""The best plans, what would make them faster, and time against cost.

Candidates are simulated in the order of their bounds, a few at a time. A bound leaves out what one mode suffers from
more than another. So after each round, bounds are corrected by how much longer the simulated candidates of the same
mode took, and the order is made anew. The last round goes to the neighbours of the best plan.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import combinations

from tailrace.planner.candidates import Candidate, Candidates
from tailrace.planner.modes import Mode, modes_of
from tailrace.planner.problem import Problem
from tailrace.planner.processes import Simulate, Trial, one_by_one
from tailrace.planner.refusal import refusal
from tailrace.planner.trial import Objective, Plan, estimate
from tailrace.planning.hardware.base import Cluster, Link, Pool

CANDIDATES = {8192: 12, 0: 24}
"""Candidates that are simulated, by the least responses of a training step."""
_ROUND = 4
_PROMISING = 200
_POINTS = 3
"""Further numbers of devices for which time and cost are simulated: halves, quarters, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a change of the best plan would bring."""

    change: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The outcome of a search."""

    problem: Problem
    objective: Objective
    plans: tuple[Plan, ...]
    """Those that were simulated, the best first."""
    enumerated: int
    """Candidates that fit."""
    gains: tuple[Gain, ...]
    front: tuple[Plan, ...]
    """Of all that were simulated, those for which no other is both faster and cheaper; the fastest first."""

    @property
    def best(self) -> Plan:
        """The best plan."""
        return self.plans[0]


def plan(
    problem: Problem,
    *,
    objective: Objective = "time",
    candidates: int | None = None,
    search_modes: bool = False,
    simulate: Simulate = one_by_one,
) -> Plans:
    """Search for the best plan.

    Args:
        objective: seconds, cost or energy of a step.
        candidates: how many are simulated for it, by default as `CANDIDATES` says; a few more are for the front and
            for gains.
        search_modes: whether to choose the mode even where the recipe gives one.
        simulate: where candidates are simulated; see `processes`.

    Raises:
        PlanError: two pools have no link between their datacentres, or nothing fits; the message says by how much, and
            what would do.
    """
    for one, other in combinations(problem.cluster.pools, 2):
        problem.cluster.between(one, other)
    space = Candidates(problem)
    modes = modes_of(problem.config, search=search_modes)
    found = [candidate for mode in modes for candidate in space.of(mode)]
    if not found:
        raise refusal(problem, modes)
    batch = problem.config.trainer.train_batch_size
    count = candidates or next(most for least, most in CANDIDATES.items() if batch >= least)
    plans = _searched(problem, _promising(found, objective), objective, count, simulate)
    points = [(problem, candidate) for candidate in _smaller(found, plans)]
    changes = list(_changes(problem, plans[0]))
    made = simulate([*points, *(trial for _, trial in changes)])
    return Plans(
        problem=problem,
        objective=objective,
        plans=tuple(plans),
        enumerated=len(found),
        gains=tuple(
            Gain(change=change, plan=one) for (change, _), one in zip(changes, made[len(points) :], strict=True)
        ),
        front=tuple(front([*plans, *made[: len(points)]])),
    )


def _promising(found: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """Those of each mode that may be simulated, so that the order of the others need not be known."""
    by_mode: dict[Mode, list[Candidate]] = defaultdict(list)
    for one in found:
        by_mode[one.mode].append(one)
    return [
        one
        for each in by_mode.values()
        for one in nsmallest(_PROMISING, each, key=lambda one: (estimate(one, objective), _devices(one)))
    ]


def _searched(
    problem: Problem, found: Sequence[Candidate], objective: Objective, count: int, simulate: Simulate
) -> list[Plan]:
    """Simulate the most promising candidates, the best of each mode among them. Return their plans, the best first."""
    rest = {number: estimate(candidate, objective) for number, candidate in enumerate(found)}
    ratios: dict[Mode, list[float]] = {candidate.mode: [] for candidate in found}
    plans: list[Plan] = []
    while rest and len(plans) < count:
        factors = {mode: statistics.median(each) if each else 1.0 for mode, each in ratios.items()}
        order = sorted(rest, key=lambda number: (factors[found[number].mode] * rest[number], _devices(found[number])))
        if not plans:
            first: dict[Mode, int] = {}
            for number in order:
                first.setdefault(found[number].mode, number)
            chosen = list(first.values())  # the most promising mode first
        elif len(plans) < count - _ROUND:
            chosen = _varied(order, found)[:_ROUND]
        else:
            best = min(plans, key=lambda one: one.value(objective))
            chosen = sorted(order, key=lambda number: _distance(found[number], best.candidate))[:_ROUND]
        chosen = chosen[: count - len(plans)]
        for number, made in zip(chosen, simulate([(problem, found[number]) for number in chosen]), strict=True):
            ratios[made.mode].append(made.value(objective) / rest.pop(number))
            plans.append(made)
    return sorted(plans, key=lambda one: (one.value(objective), one.allocation.devices))


def _varied(order: Iterable[int], found: Sequence[Candidate]) -> list[int]:
    """The first of each mode and number of devices that generate, and train; then the others."""
    first: dict[tuple[Mode, int, int], int] = {}
    others: list[int] = []
    for number in order:
        one = found[number]
        kind = one.mode, one.allocation.rollout_devices, one.allocation.layout.devices
        if first.setdefault(kind, number) != number:
            others.append(number)
    return [*first.values(), *others]


def _distance(one: Candidate, other: Candidate) -> float:
    """How unlike two candidates are: by how many times they differ in devices that generate, and train."""
    if one.mode != other.mode:
        return math.inf
    pairs = (
        (one.allocation.rollout_devices, other.allocation.rollout_devices),
        (one.allocation.trainer_devices, other.allocation.trainer_devices),
    )
    return sum(abs(math.log(max(1, mine) / max(1, theirs))) for mine, theirs in pairs)


def _devices(candidate: Candidate) -> int:
    return candidate.allocation.devices


def _smaller(found: Sequence[Candidate], plans: Sequence[Plan]) -> Iterator[Candidate]:
    """The best candidates on a half of the devices, on a quarter, and so on, in the mode of the best plan."""
    same = [one for one in found if one.mode == plans[0].mode]
    tried = {one.candidate.allocation.devices for one in plans}
    most = max(map(_devices, found))
    for halvings in range(1, _POINTS + 1):
        fitting = [one for one in same if _devices(one) <= most >> halvings]
        if not fitting:
            return
        best = min(fitting, key=lambda one: one.bound.seconds)
        if _devices(best) not in tried:
            tried.add(_devices(best))
            yield best


def front(plans: Iterable[Plan]) -> list[Plan]:
    """The plans for which no other is both faster and cheaper; the fastest first."""
    kept: list[Plan] = []
    for one in sorted(plans, key=lambda one: (one.step_s, one.usd_per_1000_steps)):
        if not kept or one.usd_per_1000_steps < kept[-1].usd_per_1000_steps:
            kept.append(one)
    return kept


def _changes(problem: Problem, best: Plan) -> Iterator[tuple[str, Trial]]:
    """The best plan with more of one thing at a time."""
    allocation = best.allocation
    generates, trains = best.candidate.engines.pool, allocation.trainer
    if allocation.colocated:
        more = min(generates.per_node, allocation.devices)
        yield from _with_more(problem, best, f"{more} more {generates.kind}", rollout=more, trainer=more)
    else:
        more = min(generates.per_node, allocation.rollout_devices)
        yield from _with_more(problem, best, f"{more} more {generates.kind} for generation", rollout=more)
        more = min(trains.per_node, allocation.layout.devices)
        critic = "" if allocation.critic is None else ", and what the critic then needs"
        yield from _with_more(problem, best, f"{more} more {trains.kind} for training{critic}", trainer=more)
        ahead = replace(best.mode, max_staleness=best.mode.max_staleness + 1)
        yield "staleness + 1", (problem, replace(best.candidate, mode=ahead))
    faster = problem.on(_linked(problem.cluster, 2.0))
    yield "networks twice as fast", (faster, _on(best.candidate, faster.cluster))


def _with_more(
    problem: Problem, best: Plan, change: str, *, rollout: int = 0, trainer: int = 0
) -> Iterator[tuple[str, Trial]]:
    """The best candidate of the same mode with so many devices more, which are added to its pools."""
    allocation, generates = best.allocation, best.candidate.engines.pool
    larger = problem.on(_enlarged(_enlarged(problem.cluster, generates, rollout), allocation.trainer, trainer))
    found = Candidates(larger).with_devices(
        best.mode,
        larger.cluster.pool(generates.name),
        larger.cluster.pool(allocation.trainer.name),
        rollout=allocation.rollout_devices + rollout,
        trainer=allocation.layout.devices + trainer,
    )
    if found:
        yield change, (larger, min(found, key=lambda one: one.bound.seconds))


def _enlarged(cluster: Cluster, pool: Pool, devices: int) -> Cluster:
    """The cluster with nodes for so many devices more in a pool."""
    pools = tuple(
        replace(one, nodes=one.nodes + -(-devices // one.per_node)) if one.name == pool.name else one
        for one in cluster.pools
    )
    return replace(cluster, pools=pools)


def _linked(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with networks so many times as fast."""

    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=factor * link.bytes_per_s)

    pools = tuple(replace(pool, network=faster(pool.network)) for pool in cluster.pools)
    return replace(cluster, pools=pools, wide={pair: faster(link) for pair, link in cluster.wide.items()})


def _on(candidate: Candidate, cluster: Cluster) -> Candidate:
    """The candidate with the pools of another cluster that has the same names."""
    allocation, engines = candidate.allocation, candidate.engines
    same = replace(engines, pool=cluster.pool(engines.pool.name))
    trainer = cluster.pool(allocation.trainer.name)
    return replace(candidate, allocation=replace(allocation, rollout=(same,), trainer=trainer))
