"""Estimates of a run's memory and time from plain numbers. Upper bounds: every response is assumed to be the longest.

Adapters have no known sizes: their memory is left out, and their time is NaN.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tailrace.config.cluster import ROLLOUT, PoolConfig
from tailrace.config.run import RunConfig

BYTES = {"bfloat16": 2, "float32": 4}
PROCESS_BYTES = 350 * 2**20
"""Memory of a worker process without weights and cache: Python with torch."""

TRAINING_EFFICIENCY = 0.5
"""The part of a large matrix product's rate that training reaches: norms, casts and the loss over the vocabulary cost
time.

The quickstart reached 0.55 in bf16 on 2 cores of an AMD EPYC. This value is lower, so the time is an upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The figures of a model for an estimate."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The figures of an engine with a model for an estimate; its backend provides them."""

    memory: Mapping[str, float]
    """Bytes by purpose that it holds all the time, on all of its ranks."""
    staged_bytes: float = 0.0
    """Further bytes for weights on their way to its ranks."""
    copies: int = 1
    """Number of copies of the weights; TP ranks share one."""
    copy_bytes: float
    """Bytes of one copy's weights, which each decode step reads."""
    batch_size: int = 1
    """Number of sequences that all copies decode together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """Measured rates of this machine."""

    flops: float
    """Floating-point operations a second, of a large matrix product in the trainer's precision."""
    bytes_per_s: float
    """Bytes of memory that a matrix-vector product reads a second."""
    threads: int
    """Number of CPU threads in that measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimate of a run: bytes by purpose, and seconds."""

    memory: dict[str, float]
    checkpoint_bytes: float
    """Bytes of one checkpoint on disk."""
    rollout_s: float
    """Seconds of the rollout of one step."""
    actor_s: float
    """Seconds of the update of one step."""
    overlap: bool
    """Whether responses of the next step are generated while a step is trained on."""

    @property
    def total_memory(self) -> float:
        """Sum of the bytes."""
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return max(self.rollout_s, self.actor_s) if self.overlap else self.rollout_s + self.actor_s


def estimate(
    config: RunConfig,
    model: ModelSize,
    engines: Mapping[str, EngineSize | None],
    prompt_tokens: float,
    speed: MachineSpeed,
    pools: Mapping[str, PoolConfig],
    scoring: Collection[str] = (),
) -> Estimate:
    """Estimate a step on a machine of `speed`, or on several such ones where the run joins a cluster.

    `engines`: those of each rollout pool, by its name; None where the size is unknown. `pools`: those of the run, by
    name. `scoring`: the names of those that hold frozen weights.

    Decoding reads all weights once a token step and computes 2 operations for each parameter and sequence. Training
    computes 6 for each parameter and packed token; a group's prompt is counted once.
    """
    prefilled = config.groups_per_step * prompt_tokens
    own_trainer = config.trainer.backend.type != "adapter"
    memory = (_trainer_memory(config, model) if own_trainer else {}) | _rollout_memory(config, engines)
    if _is_separated(config):
        memory |= _workers_memory(config, model, pools)
    if scoring:
        copies = sum(pools[name].workers for name in scoring) if _is_separated(config) else len(scoring)
        memory["reference weights"] = float(copies * _trainer_bytes(config) * model.parameters)
    return Estimate(
        memory=memory,
        checkpoint_bytes=12.0 * model.parameters if own_trainer else math.nan,
        rollout_s=_rollout_s(config, model, engines, prefilled, speed),
        actor_s=_actor_s(config, model, prefilled, speed) if own_trainer else math.nan,
        overlap=_overlaps(config),
    )


def _is_separated(config: RunConfig) -> bool:
    return config.pipeline.placement == "separated"


def _overlaps(config: RunConfig) -> bool:
    return _is_separated(config) and config.pipeline.max_staleness > 0


def _rollout_workers(config: RunConfig) -> dict[str, int]:
    """The rollout workers of each pool that has some."""
    if not _is_separated(config):
        return {ROLLOUT: 1}
    return {name: pool.workers for name, pool in config.cluster.rollout.each.items() if pool.workers}


def _on_this_machine(config: RunConfig) -> bool:
    """Whether workers share this machine's CPUs and memory."""
    return config.device == "cpu" and config.cluster.address is None


def _flops(config: RunConfig, pool: PoolConfig, speed: MachineSpeed) -> float:
    """Operations a second of one worker of `pool`.

    It has a share of the threads with all that compute at the same time.
    """
    if not _is_separated(config) or config.device != "cpu":
        return speed.flops
    threads = float(min(pool.threads_each, speed.threads))
    if _on_this_machine(config):
        rollout = list(config.cluster.rollout.each.values())
        pools = [*rollout, config.cluster.trainer] if _overlaps(config) else rollout if pool in rollout else [pool]
        wanted = sum(each.workers * min(each.threads_each, speed.threads) for each in pools)
        threads *= min(1.0, speed.threads / wanted)
    return speed.flops * threads / speed.threads


def _actor_s(config: RunConfig, model: ModelSize, prefilled: float, speed: MachineSpeed) -> float:
    trained = prefilled + config.trainer.train_batch_size * config.sampling.max_new_tokens
    return (
        6 * model.parameters * trained / (_flops(config, config.cluster.trainer, speed) * TRAINING_EFFICIENCY)
        + 28 * model.parameters / speed.bytes_per_s
    )


def _rollout_s(
    config: RunConfig, model: ModelSize, engines: Mapping[str, EngineSize | None], prefilled: float, speed: MachineSpeed
) -> float:
    """Seconds of the rollout of a step; all workers have equal parts of it, and the slowest is the last."""
    seconds = []
    workers = _rollout_workers(config)
    for name in workers:
        if (engine := engines[name]) is None:
            return math.nan
        flops = _flops(config, config.cluster.rollout.each[name], speed)
        prefill_s = 2 * model.parameters * prefilled / (flops * sum(workers.values()))
        seconds.append(_decode_s(config, model, engine, speed, flops) + prefill_s)
    return max(seconds)


def _decode_s(config: RunConfig, model: ModelSize, engine: EngineSize, speed: MachineSpeed, flops: float) -> float:
    workers = sum(_rollout_workers(config).values())
    samples = math.ceil(config.trainer.train_batch_size / workers)
    together = min(samples, engine.batch_size)
    reads = engine.copies if config.device == "cpu" else 1  # copies on CPUs share the memory's bandwidth
    reads *= workers if _on_this_machine(config) else 1
    read = reads * engine.copy_bytes / speed.bytes_per_s
    compute = 2 * model.parameters * together / flops
    return samples / together * config.sampling.max_new_tokens * (read + compute)


def _rollout_memory(config: RunConfig, engines: Mapping[str, EngineSize | None]) -> dict[str, float]:
    """Bytes of the engines, and of the weights on their way to them."""
    memory: dict[str, float] = {}
    for name, workers in _rollout_workers(config).items():
        if (engine := engines[name]) is not None:
            staged = {"staged weights": engine.staged_bytes} if engine.staged_bytes else {}
            for part, size in {**engine.memory, **staged}.items():
                memory[part] = memory.get(part, 0.0) + workers * size
    return memory


def _workers_memory(config: RunConfig, model: ModelSize, pools: Mapping[str, PoolConfig]) -> dict[str, float]:
    """Bytes that separate workers take besides those they compute with.

    They include the weights on their way between them: a version in use and the next one.
    """
    cluster = config.cluster
    apart = cluster.address is not None or config.weights.medium not in ("auto", "shared_memory")
    holders = 1 + (cluster.rollout.total if apart else 0)  # receivers on the trainer's host use its memory
    return {
        "processes": float(sum(pool.workers for pool in pools.values()) * PROCESS_BYTES),
        "published weights": float(2 * holders * BYTES[config.wire_dtype] * model.parameters),
    }


def _trainer_memory(config: RunConfig, model: ModelSize) -> dict[str, float]:
    """Bytes of the trainer. Master weights, gradients and both AdamW moments are fp32."""
    return {
        "master weights": 4.0 * model.parameters,
        "gradients": 4.0 * model.parameters,
        "AdamW moments": 8.0 * model.parameters,
        "activations of a micro-batch": _activation_bytes(config, model),
    }


def _activation_bytes(config: RunConfig, model: ModelSize) -> float:
    """Bytes of activations.

    About 14 hidden and 4 intermediate vectors are kept for each layer and token; with recomputation, of one layer only.
    """
    kept_layers = 1 if config.trainer.gradient_checkpointing else model.layers
    per_layer = 14 * model.hidden + 4 * model.intermediate
    inputs = model.layers * model.hidden if config.trainer.gradient_checkpointing else 0
    return config.trainer.micro_batch_tokens * _trainer_bytes(config) * (kept_layers * per_layer + inputs)


def _trainer_bytes(config: RunConfig) -> int:
    return 2 if config.trainer.precision == "bf16" else 4
