"""A scenario from a recipe, a model, and the devices that it gets."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailrace.config.base import GIB
from tailrace.config.engine import AdaptiveTPConfig, EngineConfig, NativeEngineConfig, VllmEngineConfig
from tailrace.config.rollout import DispatchConfig, LengthsConfig, OracleLengths, SiblingsLengths
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError, counted
from tailrace.planning.allocation import STEP_TOKENS, Allocation, Engines
from tailrace.planning.broadcast import FAN_OUT, ROOT, Site, broadcast_tree
from tailrace.planning.dispatch.moving import LinkEnd
from tailrace.planning.elasticity import ScaleLimits
from tailrace.planning.hardware.base import Cluster, Pool
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.base import Additive, MixedStepTimes
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.collectives import Group, all_gather_s
from tailrace.planning.step_times.generation import ELEMENT_BYTES
from tailrace.planning.step_times.machine import MachineProfile
from tailrace.planning.step_times.predicted_profile import degrees_of, predicted_profile
from tailrace.planning.step_times.sources import source_of
from tailrace.planning.step_times.trainer_profile import ProfiledTrainer
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Head, Layout, TrainingSetup
from tailrace.simulator.scenario import Elastic, EngineKind, Rearranging, Remaking, Scenario, Scorer, TrainerKind
from tailrace.types import CacheForm

SLOTS = 256
"""The most sequences that a replica decodes together on an accelerator, where the recipe does not say."""
TRANSFER_BASIS = Basis(kind="analytic", error=0.92)
"""Of the way of weights: Tailrace's own transfer ran as fast as a slow link, and on one host at 0.52 of the rate of a
plain copy (docs/benchmarks.md)."""
_HOP_S = 0.002
"""Seconds of a row from one task to the next, through the queue: a claim and an ack, see docs/benchmarks.md."""
_STEP_S = 0.02
"""Seconds of a training step beside all work."""
_SERVICES = 0.15
"""Cores that the other processes of a run keep busy beside separate workers: Ray, the queue, graders, the run itself.
Measured on an AMD EPYC."""


def engines_like(config: RunConfig, name: str, pool: Pool, *, tp: int = 1, dp: int = 1, engines: int = 1) -> Engines:
    """Engines of a recipe's pool on a pool of the cluster, without a cache.

    `max_batch_size` and `prefill_tokens` count where the recipe gives them. Their defaults are for a CPU.
    """
    engine = config.engines[name]
    own = {key: getattr(engine, key) for key in engine.model_fields_set if key in ("max_batch_size", "prefill_tokens")}
    return Engines(
        name=name,
        pool=pool,
        engines=engines,
        tp=tp,
        dp=dp,
        slots=own.get("max_batch_size", SLOTS),
        step_tokens=own.get("prefill_tokens", STEP_TOKENS),
        block=engine.block_size if isinstance(engine, NativeEngineConfig) else 16,
        dtype=engine.dtype if isinstance(engine, NativeEngineConfig | VllmEngineConfig) else "bfloat16",
        cache_tokens=0.0,
    )


def training_setup(config: RunConfig, shape: ModelShape, layout: Layout, *, head: Head = "chunks") -> TrainingSetup:
    """The trainer of a recipe, its reference, or its critic, whose head is `value`, in an arrangement."""
    return TrainingSetup(
        shape=shape, layout=layout, head=head, dtype="bfloat16" if config.trainer.precision == "bf16" else "float32"
    )


def weights_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of the weights on their way to engines."""
    return ELEMENT_BYTES[config.wire_dtype] * shape.parameters


def scenario_of(
    config: RunConfig,
    shape: ModelShape,
    cluster: Cluster,
    allocation: Allocation,
    *,
    steps: int,
    longest: int = 0,
    times: Callable[[Engines], MixedStepTimes] | None = None,
    critic: ModelShape | None = None,
    whole_steps: bool = False,
    remaking: Remaking | None = None,
) -> Scenario:
    """Return the scenario of a recipe.

    `longest`: tokens of the longest sample, which engines hold under all TP degrees that they change to. `times`: the
    steps of engines; by default see `source_of`. `critic`: the model of the critic, where the allocation has one.
    `whole_steps`, `remaking`: see `Scenario`.

    Raises:
        PlanError: there is no link between two pools.
    """
    trainer = AnalyticTrainingTimes(training_setup(config, shape, allocation.layout), allocation.trainer)
    every = _engines(
        config,
        shape,
        cluster,
        allocation,
        times or (lambda one: source_of(shape, one.pool, degrees(config, shape, one), one.dtype)),
        max(longest, config.sampling.max_new_tokens),
    )
    base = _played(
        config,
        steps,
        engines=tuple(kind for one in allocation.rollout for kind in every[one.name][: one.engines]),
        trainer=TrainerKind(
            times=trainer,
            ranks=allocation.layout.dp,
            stages=allocation.layout.pp,
            publish_s=publish_s(weights_bytes(config, shape), allocation.trainer, allocation.layout),
        ),
    )
    return replace(
        base,
        placement="colocated" if allocation.colocated else "separated",
        elastic=_elastic(config, allocation, every),
        reference=_reference(config, shape, allocation),
        critic=None if critic is None else _critic(config, critic, allocation),
        whole_steps=whole_steps,
        remaking=remaking,
    )


def _check_halves(config: RunConfig, half: int) -> None:
    rollout, trainer = config.cluster.rollout, config.cluster.trainer
    if rollout.total != 1 or {pool.threads_each for pool in (*rollout.each.values(), trainer)} != {half}:
        threads = " and ".join(str(pool.threads_each) for pool in (*rollout.each.values(), trainer))
        raise PlanError(
            f"the recipe has {counted(rollout.total, 'engine')} and a trainer, of {threads} threads each; measured was "
            f"one engine beside a trainer, of {half} each: give cluster.rollout.workers=1 "
            f"cluster.rollout.threads={half} cluster.trainer.threads={half}"
        )


def _tells_steps(config: RunConfig) -> bool:
    """Whether engines tell what their steps cost. Without that a run moves nothing, and scales nothing."""
    return all(isinstance(engine, NativeEngineConfig) for engine in config.engines.values())


def _without_costs(dispatch: DispatchConfig) -> DispatchConfig:
    """How a run dispatches whose engines do not tell what their steps cost: what would need that is pulled."""
    return dispatch.model_copy(update={"policy": "pull"}) if dispatch.plans else dispatch


def _played(config: RunConfig, steps: int, *, engines: tuple[EngineKind, ...], trainer: TrainerKind) -> Scenario:
    """Return what a recipe says of a run, on these engines and this trainer."""
    tells = _tells_steps(config)
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
        dispatch=config.rollout.dispatch if tells else _without_costs(config.rollout.dispatch),
        moves=tells,
        order=config.rollout.order,
        **_lengths(config.rollout.lengths),
        engines=engines,
        trainer=trainer,
        graders=config.grading_places,
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


def publish_s(weights: float, pool: Pool, layout: Layout) -> float:
    """Seconds in which a trainer on a pool gathers so many bytes of weights to hand them on."""
    return all_gather_s(weights, Group.of(pool, layout.devices))


def install_s(weights: float, pool: Pool, tp: int) -> float:
    """Seconds in which an engine on a pool takes in so many bytes of new weights."""
    return weights / tp / (pool.device.host_gb_s * 1e9)


def _engines(
    config: RunConfig,
    shape: ModelShape,
    cluster: Cluster,
    allocation: Allocation,
    times: Callable[[Engines], MixedStepTimes],
    longest: int,
) -> Mapping[str, list[EngineKind]]:
    """The engines of each pool by name, with those that may join. `longest`: tokens that each cache has to hold."""
    rollout, weights = allocation.rollout, weights_bytes(config, shape)
    arrivals = iter(() if allocation.colocated else arrivals_s(cluster, allocation, weights))
    found: dict[str, list[EngineKind]] = {}
    for one in rollout:
        source = times(one)
        like = EngineKind(
            name=one.name,
            times=source,
            tp=one.tp,
            dp=one.dp,
            adaptive_tp=_rearranging(config, shape, one, source, longest),
            slots=one.slots,
            cache_tokens=one.cache_tokens,
            prefill_tokens=one.step_tokens,
            block=one.block,
            install_s=install_s(weights, one.pool, one.tp),
            recomputes=_recomputes(config.engines[one.name]),
            link=_link(config, shape, cluster, allocation.trainer, one),
        )
        found[one.name] = [replace(like, arrive_s=next(arrivals, 0.0)) for _ in range(one.most_engines)]
    return found


def _recomputes(engine: EngineConfig) -> bool:
    return isinstance(engine, NativeEngineConfig) and engine.cache_on_update == "recompute"


def _link(config: RunConfig, shape: ModelShape, cluster: Cluster, trainer: Pool, own: Engines) -> LinkEnd:
    """The way of keys and values between an engine and the run's process, which is where the trainer is."""
    form = None
    if isinstance(config.engines[own.name], NativeEngineConfig):
        size = shape.cache_bytes(element_bytes=ELEMENT_BYTES[own.dtype])
        form = CacheForm(name=f"{own.dtype} in blocks of {own.block}", token_bytes=round(size))
    pool = own.pool
    link = pool.network if pool.datacentre == trainer.datacentre else cluster.between(trainer, pool)
    return LinkEnd(form=form, datacentre=pool.datacentre, byte_s=1 / link.bytes_per_s)


def degrees(config: RunConfig, shape: ModelShape, own: Engines) -> Sequence[int]:
    """The TP degrees that engines of a recipe may have."""
    return [own.tp] if adaptive_tp(config, own) is None else degrees_of(shape, own.tp * own.dp)


def adaptive_tp(config: RunConfig, own: Engines) -> AdaptiveTPConfig | None:
    """How engines may change their TP degree, where the recipe lets them."""
    engine = config.engines[own.name]
    return engine.adaptive_tp if isinstance(engine, NativeEngineConfig) else None


def _rearranging(
    config: RunConfig, shape: ModelShape, own: Engines, times: MixedStepTimes, needed: int
) -> Rearranging | None:
    """How engines change their TP degree, where the recipe lets them and several degrees hold the `needed` tokens."""
    adaptive = adaptive_tp(config, own)
    if adaptive is None:
        return None
    longest, ranks = config.sampling.max_new_tokens, own.tp * own.dp
    held = own.cache_tokens * shape.cache_bytes(tp=own.tp)  # of a rank, at any degree
    cache = {tp: min(held / shape.cache_bytes(tp=tp), own.room(shape, tp=tp)) for tp in degrees(config, shape, own)}
    cache = {tp: tokens for tp, tokens in cache.items() if tokens >= needed or tp == own.tp}
    if len(cache) == 1:
        return None
    profile = predicted_profile(
        times,
        shape,
        own.pool,
        ranks=ranks,
        cache_tokens=cache,
        slots=own.slots,
        longest=min(longest, shape.context),
        step_tokens=own.step_tokens,
        dtype=own.dtype,
    )
    return Rearranging(
        config=adaptive,
        profile=profile,
        cache_tokens=cache,
        kv_bytes_per_token=round(shape.cache_bytes(element_bytes=ELEMENT_BYTES[own.dtype])),
        limit=longest,
    )


def _elastic(config: RunConfig, allocation: Allocation, every: Mapping[str, list[EngineKind]]) -> Elastic | None:
    """The pool whose number of engines the run chooses, if it does. An engine that joins is like the others there.

    Its process is there: it loads its weights over the link to its host.
    """
    name = next((one.name for one in allocation.rollout if one.most is not None), None)
    if name is None or not _tells_steps(config):
        return None
    pool, like = config.cluster.rollout.each[name], every[name][-1]
    limits = ScaleLimits(least=pool.least, most=pool.most)
    return Elastic(limits=limits, joining=replace(like, starts_s=like.install_s))


def _reference(config: RunConfig, shape: ModelShape, allocation: Allocation) -> Scorer | None:
    """The workers of a reference, where the algorithm has one."""
    if allocation.reference is None:
        return None
    setup = training_setup(config, shape, replace(allocation.reference, dp=1))
    return Scorer(times=AnalyticTrainingTimes(setup, allocation.trainer), workers=allocation.reference.dp)


def _critic(config: RunConfig, shape: ModelShape, allocation: Allocation) -> TrainerKind:
    """The trainer of a critic, whose weights engines do not get."""
    layout = allocation.critic
    assert layout is not None, "a critic has devices"
    times = AnalyticTrainingTimes(training_setup(config, shape, layout, head="value"), allocation.trainer)
    return TrainerKind(times=times, ranks=layout.dp, stages=layout.pp)


def arrivals_s(cluster: Cluster, allocation: Allocation, weights: float) -> list[float]:
    """Seconds from the publication of so many bytes of weights until each engine has them, with those that may join.

    They go along the tree of the weight transfer, in pieces, so that a member passes on what it is still getting. All
    devices of a member take part, each with a part of the weights: those of a node at most, or all of the trainer's.
    Engines of one host share what has come there.

    Raises:
        PlanError: there is no link between the datacentres of the trainer and of an engine.
    """
    trainer, members = allocation.trainer, list(_members(allocation.rollout))
    first = weights / _rate(trainer, allocation.layout.devices)
    sites, engines = {site.name: site for site, _ in members}, {site.name: one for site, one in members}
    root = Site(name=ROOT, host="trainer", datacentre=trainer.datacentre)
    parents = broadcast_tree(root, list(sites.values()), fan_out=FAN_OUT)

    def way(name: str) -> tuple[float, float]:
        """Seconds of the slowest part of the way to an engine, and of its latencies."""
        parent, pool = parents[name], engines[name].pool
        before, latency_s = way(parent) if parent != ROOT else (first, 0.0)
        if parent == ROOT and pool.datacentre != trainer.datacentre:
            before = max(before, cluster.between(trainer, pool).seconds(weights))
        elif parent != ROOT and sites[parent].host == sites[name].host:
            return before, latency_s
        own = min(engines[name].tp * engines[name].dp, pool.per_node)
        return max(before, weights / _rate(pool, own)), latency_s + pool.network.latency_s

    return [sum(way(site.name)) for site, _ in members]


def _members(rollout: Sequence[Engines]) -> Iterator[tuple[Site, Engines]]:
    """Each engine with its place. Engines of one pool of the cluster stand side by side, one node after the other."""
    taken: Counter[str] = Counter()
    for one in rollout:
        for number in range(one.most_engines):
            host = f"{one.pool.name}-{taken[one.pool.name] // one.pool.per_node}"
            taken[one.pool.name] += one.tp * one.dp
            yield Site(name=f"{one.name}-{number}", host=host, datacentre=one.pool.datacentre), one


def _rate(pool: Pool, devices: int) -> float:
    """Bytes a second from so many devices of a pool to each child."""
    return devices * pool.network.bytes_per_s / FAN_OUT


def scenario_here(
    config: RunConfig,
    shape: ModelShape,
    profile: MachineProfile,
    *,
    steps: int,
    reference: bool = False,
    critic: bool = False,
    whole_steps: bool = False,
    remaking: Remaking | None = None,
) -> Scenario:
    """Return the scenario of a recipe on the machine that was profiled: one engine, and one trainer.

    Colocated, both have all cores, in turns; else each has half of them. `reference`, `critic`: whether there is one of
    the same model, which is then colocated, too. `whole_steps`, `remaking`: see `Scenario`.

    Raises:
        PlanError: there was no such engine among those that were measured, or the recipe shares the machine out
            otherwise.
    """
    engine = config.engine
    assert isinstance(engine, NativeEngineConfig), "others are not profiled"
    colocated = config.pipeline.placement == "colocated"
    cores = profile.cores if colocated else profile.half
    if not colocated:
        _check_halves(config, profile.half)
    measured, trainer = profile.engine(cores, tp=engine.tp, dp=engine.dp), profile.trainer(cores)
    kind = EngineKind(
        times=Additive(measured.times),
        tp=engine.tp,
        dp=engine.dp,
        slots=engine.max_batch_size,
        cache_tokens=engine.kv_cache_gib
        * GIB
        / shape.cache_bytes(tp=engine.tp, element_bytes=ELEMENT_BYTES[engine.dtype]),
        prefill_tokens=engine.prefill_tokens,
        block=engine.block_size,
        install_s=measured.install_s,
        recomputes=_recomputes(engine),
    )
    publication_s = 0.0 if colocated else trainer.weights_s
    base = _played(
        config, steps, engines=(kind,), trainer=TrainerKind(times=ProfiledTrainer(trainer), publish_s=publication_s)
    )
    base = replace(
        base,
        reference=Scorer(times=ProfiledTrainer(trainer)) if reference else None,
        critic=TrainerKind(times=ProfiledTrainer(trainer, gives_values=True)) if critic else None,
        whole_steps=whole_steps,
        remaking=remaking,
    )
    if colocated:
        return base
    left = profile.cores / (profile.cores - _SERVICES)
    return replace(base, engine_beside=left * profile.engine_beside, trainer_beside=left * profile.trainer_beside)
