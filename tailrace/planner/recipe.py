"""A plan as a recipe that `train` takes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from tailrace.config.base import GIB
from tailrace.config.overrides import merged
from tailrace.config.recipe_text import write_yaml
from tailrace.config.run import RunConfig
from tailrace.errors import counted
from tailrace.planner.candidates import Candidate
from tailrace.planner.problem import Problem
from tailrace.planner.trial import Plan
from tailrace.planning.allocation import Engines
from tailrace.planning.hardware.base import Cluster, Pool
from tailrace.planning.step_times.training_setup import Layout

_WORKERS = ("workers", "min_workers", "max_workers", "pools", "gpus", "datacentre")
"""Keys of the rollout pool that a plan gives."""
_PLACES = ("datacentre", "resources")
"""Keys of a pool that say where its workers are."""
_SOME = 0.001
"""What a worker asks of the resource that Ray gives each node for its kind of GPU."""


def recipe_text(values: Mapping[str, Any], problem: Problem, plan: Plan, *, model: str | None = None) -> str:
    """Return the recipe of a plan, with what Tailrace's own trainer cannot do as comments before it.

    Args:
        values: those of the recipe that was planned for, which is the problem's.
        model: `model.path` of the model that was planned for, where it is another one.
    """
    config = problem.config
    if model is not None and model != config.model.path:
        values = merged(without(values, "model"), {"model": {"path": model}})
    comments = "".join(f"# {line}\n" for line in _comments(config, plan))
    return comments + write_yaml(_recipe_values(values, problem, plan))


def _recipe_values(values: Mapping[str, Any], problem: Problem, plan: Plan) -> dict[str, Any]:
    """The values of a recipe, changed to what a plan says."""
    config, mode, candidate = problem.config, plan.mode, plan.candidate
    kept = dict(values)
    if mode.colocated:
        kept = without(kept, "weights", "mode")
    else:
        kept.pop("threads", None)  # separate workers have those of their pools
        for key in _WORKERS:
            kept = without(kept, "cluster", "rollout", key)
        if len(problem.cluster.pools) > 1:
            for pool, key in product(_pools(plan), _PLACES):
                kept = without(kept, "cluster", *pool, key)
    if not mode.streaming:
        kept = without(kept, "pipeline", "in_order")
    changes: dict[str, Any] = {
        "device": config.device if "device" in config.model_fields_set else "cuda",
        "pipeline": mode.values,
        "trainer": _trainer(config, candidate),
        "rewards": _rewards(config, candidate),
        "engine": _engine(config, plan),
    }
    if not mode.colocated:
        changes["cluster"] = _cluster(problem, plan)
        changes["queue"] = queue_values(config, mode.max_staleness)
    return merged(_with_degrees(kept, candidate.engines), changes)


def _with_degrees(values: Mapping[str, Any], engines: Engines) -> dict[str, Any]:
    """The values of a recipe whose engines change to such TP degrees alone as their ranks allow; or not at all."""
    ranks, tp = engines.tp * engines.dp, engines.tp
    adaptive = (values.get("engine") or {}).get("adaptive_tp")
    given = None if adaptive is None else adaptive.get("degrees")
    allowed = [degree for degree in given or range(1, ranks + 1) if ranks % degree == 0]
    if adaptive is None or not {*allowed} - {tp}:
        fixed = without(values, "engine", "adaptive_tp")
        return without(fixed, "engine", "link") if tp == 1 else fixed
    return dict(values) if given is None else merged(values, {"engine": {"adaptive_tp": {"degrees": allowed}}})


def without(values: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """Values without the key at a path; the same where it is not there."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != first}
    below = values.get(first)
    return {**values, first: without(below, *rest)} if isinstance(below, Mapping) else dict(values)


def _trainer(config: RunConfig, candidate: Candidate) -> dict[str, Any]:
    """The keys of the trainer. One of the user's own is told its arrangement."""
    layout = candidate.allocation.layout
    own = {"options": {"layout": asdict(layout)}} if config.trainer.backend.type == "adapter" else {}
    return {
        "micro_batch_tokens": candidate.micro_batch_tokens,
        "gradient_checkpointing": layout.checkpointing == "full",
        **({"backend": own} if own else {}),
    }


def _rewards(config: RunConfig, candidate: Candidate) -> dict[str, Any]:
    """The processes of the grader, or of each of several."""
    rewards = candidate.mode.applied(config).with_grading_places(candidate.graders).rewards
    if rewards.grader is not None:
        return {"workers": rewards.workers}
    return {"graders": {name: {"workers": grading.workers} for name, grading in rewards.graders.items()}}


def _engine(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """The keys of the engine that the plan rests on. Engines of other types have none for their arrangement."""
    held = plan.engine.instants[plan.engine.worst]["KV cache"] / GIB
    engines = plan.candidate.engines
    # rounded down: a cache of all the room that there is fits again when the recipe is read
    sizes = {"kv_cache_gib": math.floor(held * 1000) / 1000, "max_batch_size": engines.slots}
    match config.engine.type:
        case "native":
            arrangement = {"tp": engines.tp, "dp": engines.dp}
            return {"type": "native", **arrangement, **sizes, "prefill_tokens": engines.step_tokens}
        case "vllm":
            return {"type": "vllm", **sizes}
    return {}


def _pools(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The keys of the pools that a plan places, below `cluster`."""
    yield from (("rollout",), ("trainer",), ("reference",))
    if plan.critic_pool:
        yield "pools", plan.critic_pool


def _cluster(problem: Problem, plan: Plan) -> dict[str, Any]:
    allocation, engines = plan.allocation, plan.candidate.engines
    trainer = allocation.trainer
    there = _place(trainer, problem.cluster)
    pools: dict[str, Any] = {
        "rollout": {
            "workers": engines.engines,
            "gpus": float(engines.tp * engines.dp),
            **_place(engines.pool, problem.cluster),
        },
        "trainer": {"gpus": float(min(allocation.layout.devices, trainer.per_node)), **there},
    }
    if allocation.reference is not None:
        pools["reference"] = {
            "workers": allocation.reference.dp,
            "gpus": float(allocation.reference.tp),
            **there,
        }
    if allocation.critic is not None:
        critic = {"gpus": float(min(allocation.critic.devices, trainer.per_node)), **there}
        pools["pools"] = {plan.critic_pool: critic}
    return {"address": problem.config.cluster.address or "auto", **pools}


def _place(pool: Pool, cluster: Cluster) -> dict[str, Any]:
    """The keys that tell workers the nodes of one of several pools: its datacentre, and the kind of its devices."""
    if len(cluster.pools) == 1:
        return {}
    datacentre = {"datacentre": pool.datacentre} if pool.datacentre else {}
    of_one_kind = len({one.kind for one in cluster.pools}) == 1
    return datacentre if of_one_kind else {**datacentre, "resources": {f"accelerator_type:{pool.kind}": _SOME}}


def queue_values(config: RunConfig, max_staleness: int) -> dict[str, Any]:
    """A queue that separate workers reach, with room for the steps that are under way."""
    if config.queue.type == "remote":
        return {}
    needed = config.least_rows(max_staleness)
    own = {} if config.queue.type == "local" else {"max_rows": max(needed, config.queue.max_rows)}
    return {"type": "service", **(own or {"max_rows": 2 * needed})}


def _comments(config: RunConfig, plan: Plan) -> Iterator[str]:
    allocation, engines, layout = plan.allocation, plan.candidate.engines, plan.allocation.layout
    low, high = plan.interval_s
    devices = counted(allocation.devices, "device")
    yield f"A plan: {plan.mode}, {devices}, {plan.step_s:.1f} s a step ({low:.1f} to {high:.1f})."
    yield (
        f"Engines: {engines.engines} of TP {engines.tp} and DP {engines.dp} on {engines.devices} {engines.pool.kind}."
    )
    yield (
        f"Trainer: TP {layout.tp}, PP {layout.pp}, DP {layout.dp} on {layout.devices} {allocation.trainer.kind}, "
        f"sharding {layout.sharding}, checkpointing {layout.checkpointing}{', offload' if layout.offload else ''}."
    )
    if layout.devices > 1:
        yield from _trainer_comments(config, layout)
    if not allocation.colocated and layout.devices > allocation.trainer.per_node:
        others = layout.devices - allocation.trainer.per_node
        yield (
            f"cluster.trainer.gpus are those of one node, where the trainer's process is. It has to take the {others} "
            "others itself."
        )
    if allocation.colocated and allocation.devices > 1:
        yield "Colocated, Tailrace has engine and trainer in one process, which has one device for the trainer."
    if engines.pool.kind != allocation.trainer.kind:
        yield "Workers find their nodes by Ray's resources for kinds of GPUs: compare the names with `ray status`."
    if config.engine.type not in ("native",) and engines.tp > 1:
        yield f"The engine {config.engine.type!r} has no key for TP here: give it its degree in its own way."
    if allocation.critic is not None and allocation.critic.devices > 1:
        yield f"Tailrace's own critic has one device, and this plan's has {allocation.critic.devices}."
    if allocation.reference is not None and allocation.reference.tp > 1:
        yield "Tailrace's own reference has one device; this plan gives each of its workers several."


def _trainer_comments(config: RunConfig, layout: Layout) -> Iterator[str]:
    """What a trainer of several devices takes, which is the user's own (docs/adapters.md)."""
    if config.trainer.backend.type == "adapter":
        yield "Your trainer is told its arrangement as the keyword `layout`: trainer.backend.options."
        return
    given = ", ".join(f"{name}: {str(value).lower()}" for name, value in asdict(layout).items())
    yield f"Tailrace's own trainer has one device, and this plan's has {layout.devices}. Give one of your own:"
    yield "  trainer:"
    yield f"    backend: {{type: adapter, path: my_trainer.MyTrainer, options: {{layout: {{{given}}}}}}}"
