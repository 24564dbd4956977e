"""What is said where nothing fits: by how much, and what would do."""

from collections.abc import Sequence
from dataclasses import replace

from tailrace.config.cluster import ROLLOUT
from tailrace.errors import PlanError
from tailrace.planner.candidates import Candidates
from tailrace.planner.modes import Mode
from tailrace.planner.problem import Problem
from tailrace.planner.trainings import MICRO_BATCH_TOKENS
from tailrace.planning.allocation import best_layout, least_tp
from tailrace.planning.hardware.base import Cluster, Pool
from tailrace.planning.step_times.training_setup import Layout
from tailrace.simulator.setup import engines_like

_MOST_NODES = 4096


def refusal(problem: Problem, modes: Sequence[Mode]) -> PlanError:
    """Return the error of a problem for which no candidate fits."""
    pool = max(problem.cluster.pools, key=lambda pool: pool.devices * pool.device.memory_gib)
    lacking = _lacking(problem, pool)
    if (nodes := _least_nodes(problem, pool, modes)) is None:
        return PlanError(f"{lacking}; no number of {pool.kind} would do")
    devices = nodes * pool.device.devices_per_node  # whole nodes were searched
    return PlanError(f"{lacking}; the smallest cluster of {pool.kind} that would do is {devices}x{pool.kind}")


def _lacking(problem: Problem, pool: Pool) -> str:
    """What lacks how much, on all devices of a pool."""
    batches = replace(problem.load.batches, micro_batch_tokens=MICRO_BATCH_TOKENS[0])
    try:
        least_tp(engines_like(problem.config, ROLLOUT, pool), problem.shape, tokens=batches.longest)
        for shape in (problem.shape, *([] if problem.critic is None else [problem.critic])):
            best_layout(shape, pool, pool.devices, batches, problem.setup(Layout()).dtype)
    except PlanError as error:
        return str(error).rpartition(";")[0]
    who, both = ("engines and trainer", "both") if problem.critic is None else ("engines, trainer and critic", "all")
    return (
        f"{who} of {problem.shape.name} each fit on {pool.devices} {pool.kind}, but there is no split of these devices "
        f"on which {both} fit"
    )


def _least_nodes(problem: Problem, pool: Pool, modes: Sequence[Mode]) -> int | None:
    """The fewest nodes of a kind on which a candidate fits; None where that is more than anybody has."""
    whole = replace(pool, per_node=pool.device.devices_per_node)

    def fits(nodes: int) -> bool:
        cluster = Cluster(pools=(replace(whole, nodes=nodes),))
        return any(Candidates(problem.on(cluster)).fits(mode) for mode in modes)

    if not Candidates(problem.on(Cluster(pools=(whole,)))).degrees(whole.name):
        return None  # no node holds an engine
    most = 1
    while not fits(most):
        if (most := 2 * most) > _MOST_NODES:
            return None
    least = most // 2 + 1
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle + 1, most)
    return most
