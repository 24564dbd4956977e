"""A scenario from a recipe, a model, and the devices that it gets."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from tailrace.config.base import GIB
from tailrace.config.cluster import ROLLOUT
from tailrace.config.engine import NativeEngineConfig, VllmEngineConfig
from tailrace.config.rollout import LengthsConfig, OracleLengths, SiblingsLengths
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError
from tailrace.planning.allocation import Allocation, Batches, engine_tokens, mean_batches
from tailrace.planning.broadcast import ROOT, Site, broadcast_tree
from tailrace.planning.elasticity import ScaleLimits
from tailrace.planning.hardware.base import Cluster, Pool
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.base import Additive, MixedStepTimes
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.collectives import Group, all_gather_s
from tailrace.planning.step_times.machine import MachineProfile
from tailrace.planning.step_times.predicted_profile import degrees_of, predicted_profile
from tailrace.planning.step_times.sources import source_of
from tailrace.planning.step_times.trainer_profile import ProfiledTrainer
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, TrainingSetup
from tailrace.simulator.scenario import Elastic, EngineKind, Rearranging, Scenario, Scorer, TrainerKind
from tailrace.workloads.replay import Replay

SLOTS = 256
"""The most sequences that a replica decodes together on an accelerator, where the recipe does not say."""
PREFILL_TOKENS = 8192
"""Tokens of prompts in a step there."""
TRANSFER_BASIS = Basis(kind="analytic", error=0.92)
"""Of the way of weights: Tailrace's own transfer ran as fast as a slow link, and on one host at 0.52 of the rate of a
plain copy (docs/benchmarks.md)."""
_FAN_OUT = 2
"""Children of a member of the tree along which weights are sent, as in `transfer.weights`."""
_HOP_S = 0.002
"""Seconds of a row from one task to the next, through the queue: a claim and an ack, see docs/benchmarks.md."""
_STEP_S = 0.02
"""Seconds of a training step beside all work."""
_SERVICES = 0.15
"""Cores that the other processes of a run keep busy beside separate workers: Ray, the queue, graders, the run itself.
Measured on an AMD EPYC."""


def step_batches(config: RunConfig, replay: Replay) -> Batches:
    """Return what a training step of a recipe has in the mean of a workload."""
    size = config.algorithm.group_size
    groups = [(group[0].prompt_tokens, [script.tokens for script in group[:size]]) for group in replay.groups]
    return mean_batches(
        groups, groups_per_step=config.groups_per_step, micro_batch_tokens=config.trainer.micro_batch_tokens
    )


def slots_of(config: RunConfig) -> int:
    """The most sequences that a replica decodes together."""
    engine = config.engine
    given = isinstance(engine, NativeEngineConfig | VllmEngineConfig) and "max_batch_size" in engine.model_fields_set
    return engine.max_batch_size if given else SLOTS  # type: ignore[union-attr]


def scenario_of(
    config: RunConfig,
    shape: ModelShape,
    cluster: Cluster,
    allocation: Allocation,
    *,
    steps: int,
    times: Callable[[Pool], MixedStepTimes] | None = None,
) -> Scenario:
    """Return the scenario of a recipe.

    `times`: the steps of engines on a pool; by default see `source_of`.

    Raises:
        PlanError: an engine has no room for its weights, or there is no link between two pools.
    """
    setup = TrainingSetup(shape=shape, layout=allocation.layout)
    trainer = AnalyticTrainingTimes(setup, allocation.trainer)
    source = (times or partial(source_of, shape))(allocation.rollout)
    engines = list(_engines(config, shape, cluster, allocation, source))
    base = _played(
        config,
        steps,
        engines=tuple(engines[: allocation.engines]),
        trainer=TrainerKind(
            times=trainer,
            ranks=allocation.layout.dp,
            stages=allocation.layout.pp,
            publish_s=publish_s(shape, allocation.trainer, allocation.layout),
        ),
    )
    return replace(
        base,
        placement="colocated" if allocation.colocated else "separated",
        elastic=None if allocation.most_engines is None else _elastic(config, engines[-1]),
        reference=_reference(shape, allocation),
    )


def _played(config: RunConfig, steps: int, *, engines: tuple[EngineKind, ...], trainer: TrainerKind) -> Scenario:
    """Return what a recipe says of a run, on these engines and this trainer."""
    return Scenario(
        steps=steps,
        groups_per_step=config.groups_per_step,
        group_size=config.algorithm.group_size,
        mini_batches=config.mini_batches_per_step,
        epochs=config.trainer.epochs,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        placement=config.pipeline.placement,
        max_staleness=config.pipeline.max_staleness,
        streaming=config.pipeline.streaming,
        in_order=config.pipeline.in_order,
        weights=config.weights_mode,
        dispatch=config.rollout.dispatch,
        order=config.rollout.order,
        **_lengths(config.rollout.lengths),
        engines=engines,
        trainer=trainer,
        graders=config.rewards.least_workers,
        hop_s=_HOP_S,
        step_s=_STEP_S,
        seed=config.seed,
    )


def _lengths(config: LengthsConfig | None) -> dict[str, Any]:
    """What is expected of responses. What a prompt or its past tells is taken to be the mean of its group."""
    match config:
        case None:
            return {"knows_lengths": "nothing"}
        case OracleLengths():
            return {"knows_lengths": "lengths"}
        case SiblingsLengths():
            return {"knows_lengths": "siblings", "lengths_discount": config.discount}
        case _:
            return {"knows_lengths": "group_means"}


def _bytes(shape: ModelShape) -> float:
    """Bytes of the weights on their way to engines."""
    return 2.0 * shape.parameters


def publish_s(shape: ModelShape, pool: Pool, layout: Layout) -> float:
    """Seconds in which a trainer on a pool gathers its weights to hand them on."""
    return all_gather_s(_bytes(shape), Group.of(pool, layout.devices))


def install_s(shape: ModelShape, pool: Pool, tp: int) -> float:
    """Seconds in which an engine on a pool takes in new weights."""
    return _bytes(shape) / tp / (pool.device.host_gb_s * 1e9)


def _engines(
    config: RunConfig, shape: ModelShape, cluster: Cluster, allocation: Allocation, times: MixedStepTimes
) -> Iterator[EngineKind]:
    pool, tp, slots = allocation.rollout, allocation.tp, slots_of(config)
    cache = _cache_tokens(shape, pool, tp, slots)
    if cache <= 0:
        raise PlanError(f"an engine of {shape.name} with TP {tp} does not fit on {pool.kind}; raise its TP degree")
    adaptive_tp = _adaptive_tp(config, shape, allocation, times)
    every = replace(allocation, engines=allocation.most_engines or allocation.engines)
    arrivals = [0.0] * every.engines if allocation.colocated else arrivals_s(cluster, every, _bytes(shape))
    for name, seconds in zip(_pools(config, allocation), arrivals, strict=True):
        yield EngineKind(
            name=name,
            times=times,
            tp=tp,
            dp=allocation.dp,
            adaptive_tp=adaptive_tp,
            slots=slots,
            cache_tokens=cache,
            prefill_tokens=PREFILL_TOKENS,
            block=16,
            arrive_s=seconds,
            install_s=install_s(shape, pool, tp),
        )


def _cache_tokens(shape: ModelShape, pool: Pool, tp: int, slots: int) -> float:
    return engine_tokens(shape, pool, tp=tp, step_tokens=PREFILL_TOKENS, slots=slots)


def _adaptive_tp(
    config: RunConfig, shape: ModelShape, allocation: Allocation, times: MixedStepTimes
) -> Rearranging | None:
    """How engines change their TP degree, where the recipe lets them and several degrees hold the longest response."""
    engine, pool, slots = config.engine, allocation.rollout, slots_of(config)
    if not isinstance(engine, NativeEngineConfig) or engine.adaptive_tp is None:
        return None
    longest, ranks = config.sampling.max_new_tokens, allocation.tp * allocation.dp
    cache = {tp: _cache_tokens(shape, pool, tp, slots) for tp in degrees_of(shape, ranks)}
    cache = {tp: tokens for tp, tokens in cache.items() if tokens >= longest or tp == allocation.tp}
    if len(cache) == 1:
        return None
    profile = predicted_profile(
        times,
        shape,
        pool,
        ranks=ranks,
        cache_tokens=cache,
        slots=slots,
        longest=min(longest, shape.context),
        step_tokens=PREFILL_TOKENS,
    )
    return Rearranging(
        config=engine.adaptive_tp,
        profile=profile,
        cache_tokens=cache,
        kv_bytes_per_token=round(shape.cache_bytes()),
        limit=longest,
    )


def _pools(config: RunConfig, allocation: Allocation) -> list[str]:
    """The pool of each engine by name; those of engines that may join are not asked for."""
    names = [name for name, pool in config.cluster.rollout.each.items() for _ in range(pool.workers)]
    known = names if len(names) == allocation.engines else []
    return known + [ROLLOUT] * ((allocation.most_engines or allocation.engines) - len(known))


def _elastic(config: RunConfig, like: EngineKind) -> Elastic:
    """The pool whose number of engines a recipe leaves to the run. An engine that joins is like the given one.

    Its process is there: it loads its weights over the link to its host.
    """
    rollout = config.cluster.rollout
    name = rollout.elastic
    assert name is not None
    pool = rollout.each[name]
    limits = ScaleLimits(least=pool.least, most=pool.most)
    return Elastic(limits=limits, joining=replace(like, name=name, starts_s=like.install_s))


def _reference(shape: ModelShape, allocation: Allocation) -> Scorer | None:
    """The workers of a reference, where the algorithm has one."""
    if allocation.reference is None:
        return None
    setup = TrainingSetup(shape=shape, layout=replace(allocation.reference, dp=1))
    return Scorer(times=AnalyticTrainingTimes(setup, allocation.trainer), workers=allocation.reference.dp)


def arrivals_s(cluster: Cluster, allocation: Allocation, weights: float) -> list[float]:
    """Seconds from the publication of weights until each engine has them.

    They go along the tree of the weight transfer, in pieces, so that a member passes on what it is still getting. All
    devices of a member take part, each with a part of the weights. Engines of one host share what has come there.
    """
    rollout, trainer = allocation.rollout, allocation.trainer
    link = cluster.between(trainer, rollout)
    own = allocation.tp * allocation.dp
    sites = [
        Site(name=str(number), host=f"host-{number * own // rollout.per_node}", datacentre=rollout.datacentre)
        for number in range(allocation.engines)
    ]
    root = Site(name=ROOT, host="trainer", datacentre=trainer.datacentre)
    parents = broadcast_tree(root, sites, fan_out=_FAN_OUT)
    hosts = {site.name: site.host for site in sites}
    lanes = min(own, rollout.per_node) * rollout.network.bytes_per_s / _FAN_OUT  # a member has as many children
    far = trainer.datacentre != rollout.datacentre
    crossing_s = link.seconds(weights) if far else 0.0

    def hops(name: str) -> int:
        parent = parents[name]
        return 0 if parent == ROOT else hops(parent) + (hosts[parent] != hosts[name])

    latency_s = rollout.network.latency_s
    return [max(crossing_s, weights / lanes) + latency_s * (1 + hops(site.name)) for site in sites]


def scenario_here(config: RunConfig, shape: ModelShape, profile: MachineProfile, *, steps: int) -> Scenario:
    """Return the scenario of a recipe on the machine that was profiled: one engine, and one trainer.

    Colocated, both have all cores, in turns; else each has half of them.

    Raises:
        PlanError: there was no such engine among those that were measured.
    """
    engine = config.engine
    assert isinstance(engine, NativeEngineConfig), "others are not profiled"
    colocated = config.pipeline.placement == "colocated"
    cores = profile.cores if colocated else profile.half
    measured, trainer = profile.engine(cores, tp=engine.tp, dp=engine.dp), profile.trainer(cores)
    kind = EngineKind(
        times=Additive(measured.costs),
        tp=engine.tp,
        dp=engine.dp,
        slots=engine.max_batch_size,
        cache_tokens=engine.kv_cache_gib * GIB / shape.cache_bytes(),
        prefill_tokens=engine.prefill_tokens,
        block=engine.block_size,
        install_s=measured.install_s,
    )
    publication_s = 0.0 if colocated else trainer.weights_s
    base = _played(
        config, steps, engines=(kind,), trainer=TrainerKind(times=ProfiledTrainer(trainer), publish_s=publication_s)
    )
    if colocated:
        return base
    left = profile.cores / (profile.cores - _SERVICES)
    return replace(base, engine_beside=left * profile.engine_beside, trainer_beside=left * profile.trainer_beside)
