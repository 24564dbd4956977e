"""Memory and time of a run, from plain numbers. Upper bounds: every response is taken at its longest.

Of adapters nothing is known: what they take is left out of the memory, and their time is NaN.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tailrace.config.cluster import PoolConfig
from tailrace.config.run import RunConfig

BYTES = {"bfloat16": 2, "float32": 4}
PROCESS_BYTES = 350 * 2**20
"""Of a worker process without weights and cache: Python with torch."""

TRAINING_EFFICIENCY = 0.5
"""What training reaches of the rate of a large matrix product: norms, casts and the loss over the vocabulary cost time.

The quickstart reached 0.55 in bf16 on 2 cores of an AMD EPYC. With less than that here, the time is an upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What an estimate needs to know of a model."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """What an estimate needs to know of an engine that holds a model; its backend says it."""

    memory: Mapping[str, float]
    """Bytes by purpose that it holds all the time, on all of its ranks."""
    staged_bytes: float = 0.0
    """Further ones for weights on their way to its ranks."""
    copies: int = 1
    """Of the weights; TP ranks share one."""
    copy_bytes: float
    """Weights of one copy, which each decode step reads."""
    batch_size: int = 1
    """Sequences that all copies decode together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """Measured rates of this machine."""

    flops: float
    """Floating-point operations a second, of a large matrix product in the trainer's precision."""
    bytes_per_s: float
    """Memory read by a matrix-vector product."""
    threads: int
    """Of CPUs, with which that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes by purpose, and seconds."""

    memory: dict[str, float]
    checkpoint_bytes: float
    """On disk, of one checkpoint."""
    rollout_s: float
    """Of one step."""
    actor_s: float
    """Of one step."""
    overlap: bool
    """Whether responses of the next step are generated while a step is trained on."""

    @property
    def total_memory(self) -> float:
        """Bytes."""
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return max(self.rollout_s, self.actor_s) if self.overlap else self.rollout_s + self.actor_s


def estimate(
    config: RunConfig,
    model: ModelSize,
    engine: EngineSize | None,
    prompt_tokens: float,
    speed: MachineSpeed,
    pools: Mapping[str, PoolConfig],
    scoring: Collection[str] = (),
) -> Estimate:
    """What a step takes on a machine of `speed`, or on several such ones where the run joins a cluster.

    `engine`: None where its size is not known. `pools`: of the algorithm's table, by kind. `scoring`: those that hold
    frozen weights.

    Decoding reads all weights once a token step and computes 2 operations for each parameter and sequence; training
    computes 6 for each parameter and packed token, a group's prompt counted once.
    """
    prefilled = config.groups_per_step * prompt_tokens
    own_trainer = config.trainer.backend.type != "adapter"
    memory = (_trainer_memory(config, model) if own_trainer else {}) | _rollout_memory(config, engine)
    if _is_separated(config):
        memory |= _workers_memory(config, model, pools)
    if scoring:
        copies = sum(pools[kind].workers for kind in scoring) if _is_separated(config) else len(scoring)
        memory["reference weights"] = float(copies * _trainer_bytes(config) * model.parameters)
    return Estimate(
        memory=memory,
        checkpoint_bytes=12.0 * model.parameters if own_trainer else math.nan,
        rollout_s=math.nan if engine is None else _rollout_s(config, model, engine, prefilled, speed),
        actor_s=_actor_s(config, model, prefilled, speed) if own_trainer else math.nan,
        overlap=_overlaps(config),
    )


def _is_separated(config: RunConfig) -> bool:
    return config.pipeline.placement == "separated"


def _overlaps(config: RunConfig) -> bool:
    return _is_separated(config) and config.pipeline.max_staleness > 0


def _rollout_workers(config: RunConfig) -> int:
    return config.cluster.rollout.workers if _is_separated(config) else 1


def _on_this_machine(config: RunConfig) -> bool:
    """Whether workers share its CPUs and its memory."""
    return config.device == "cpu" and config.cluster.address is None


def _flops(config: RunConfig, pool: PoolConfig, speed: MachineSpeed) -> float:
    """Of one worker of `pool`, by its part of the threads: they are shared by all who compute at the same time."""
    if not _is_separated(config) or config.device != "cpu":
        return speed.flops
    threads = float(min(pool.threads_each, speed.threads))
    if _on_this_machine(config):
        pools = (config.cluster.rollout, config.cluster.trainer) if _overlaps(config) else (pool,)
        wanted = sum(each.workers * min(each.threads_each, speed.threads) for each in pools)
        threads *= min(1.0, speed.threads / wanted)
    return speed.flops * threads / speed.threads


def _actor_s(config: RunConfig, model: ModelSize, prefilled: float, speed: MachineSpeed) -> float:
    trained = prefilled + config.trainer.train_batch_size * config.sampling.max_new_tokens
    return (
        6 * model.parameters * trained / (_flops(config, config.cluster.trainer, speed) * TRAINING_EFFICIENCY)
        + 28 * model.parameters / speed.bytes_per_s
    )


def _rollout_s(config: RunConfig, model: ModelSize, engine: EngineSize, prefilled: float, speed: MachineSpeed) -> float:
    """Of the workers, which have equal parts of the step."""
    flops, workers = _flops(config, config.cluster.rollout, speed), _rollout_workers(config)
    return _decode_s(config, model, engine, speed, flops) + 2 * model.parameters * prefilled / (flops * workers)


def _decode_s(config: RunConfig, model: ModelSize, engine: EngineSize, speed: MachineSpeed, flops: float) -> float:
    samples = math.ceil(config.trainer.train_batch_size / _rollout_workers(config))
    together = min(samples, engine.batch_size)
    reads = engine.copies if config.device == "cpu" else 1  # copies on CPUs read through the same memory
    reads *= _rollout_workers(config) if _on_this_machine(config) else 1
    read = reads * engine.copy_bytes / speed.bytes_per_s
    compute = 2 * model.parameters * together / flops
    return samples / together * config.sampling.max_new_tokens * (read + compute)


def _rollout_memory(config: RunConfig, engine: EngineSize | None) -> dict[str, float]:
    """Of the engines, and of the weights on their way to them."""
    if engine is None:
        return {}
    memory = dict(engine.memory)
    if engine.staged_bytes:
        memory["staged weights"] = engine.staged_bytes
    return {name: _rollout_workers(config) * size for name, size in memory.items()}


def _workers_memory(config: RunConfig, model: ModelSize, pools: Mapping[str, PoolConfig]) -> dict[str, float]:
    """What separate workers take beyond what they compute with, and the weights on their way between them: a version
    that is used and the next one."""
    cluster = config.cluster
    apart = cluster.address is not None or config.weights.medium not in ("auto", "shared_memory")
    holders = 1 + (cluster.rollout.workers if apart else 0)  # receivers on the trainer's host use its memory
    return {
        "processes": float(sum(pool.workers for pool in pools.values()) * PROCESS_BYTES),
        "published weights": float(2 * holders * BYTES[config.wire_dtype] * model.parameters),
    }


def _trainer_memory(config: RunConfig, model: ModelSize) -> dict[str, float]:
    """Master weights, gradients and both AdamW moments are fp32."""
    return {
        "master weights": 4.0 * model.parameters,
        "gradients": 4.0 * model.parameters,
        "AdamW moments": 8.0 * model.parameters,
        "activations of a micro-batch": _activation_bytes(config, model),
    }


def _activation_bytes(config: RunConfig, model: ModelSize) -> float:
    """About 14 hidden and 4 intermediate vectors a layer and token are kept; one layer's with recomputation."""
    kept_layers = 1 if config.trainer.gradient_checkpointing else model.layers
    per_layer = 14 * model.hidden + 4 * model.intermediate
    inputs = model.layers * model.hidden if config.trainer.gradient_checkpointing else 0
    return config.trainer.micro_batch_tokens * _trainer_bytes(config) * (kept_layers * per_layer + inputs)


def _trainer_bytes(config: RunConfig) -> int:
    return 2 if config.trainer.precision == "bf16" else 4
