"""Memory and time of a colocated run, from plain numbers. Upper bounds: every response is taken at its longest.

Of adapters nothing is known: what they take is left out of the memory, and their time is NaN.
"""

import math
from dataclasses import dataclass

from tailrace.config.engine import EngineConfig
from tailrace.config.run import RunConfig

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}
PROCESS_BYTES = 350 * 2**20
"""Of a worker process without weights and cache: Python with torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What an estimate needs to know of a model."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """Measured rates of this machine."""

    flops: float
    """Floating-point operations a second, of a large matrix product in the trainer's precision."""
    bytes_per_s: float
    """Memory read by a matrix-vector product."""


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

    @property
    def total_memory(self) -> float:
        """Bytes."""
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return self.rollout_s + self.actor_s


def estimate(config: RunConfig, model: ModelSize, prompt_tokens: float, speed: MachineSpeed) -> Estimate:
    """What a step takes on a machine of `speed`.

    Decoding reads all weights once a token step and computes 2 operations for each parameter and sequence; training
    computes 6 for each parameter and packed token, a group's prompt counted once.
    """
    prefilled = config.groups_per_step * prompt_tokens
    own_trainer = config.trainer.backend.type != "adapter"
    return Estimate(
        memory=(_trainer_memory(config, model) if own_trainer else {}) | _rollout_memory(config, model),
        checkpoint_bytes=12.0 * model.parameters if own_trainer else math.nan,
        rollout_s=_rollout_s(config, model, prefilled, speed) if config.engine.type != "adapter" else math.nan,
        actor_s=_actor_s(config, model, prefilled, speed) if own_trainer else math.nan,
    )


def _actor_s(config: RunConfig, model: ModelSize, prefilled: float, speed: MachineSpeed) -> float:
    trained = prefilled + config.trainer.train_batch_size * config.sampling.max_new_tokens
    return 6 * model.parameters * trained / speed.flops + 28 * model.parameters / speed.bytes_per_s


def _rollout_s(config: RunConfig, model: ModelSize, prefilled: float, speed: MachineSpeed) -> float:
    return _decode_s(config, model, speed) + 2 * model.parameters * prefilled / speed.flops


def _decode_s(config: RunConfig, model: ModelSize, speed: MachineSpeed) -> float:
    samples = config.trainer.train_batch_size
    together = min(samples, _batch_size(config))
    reads = _copies(config.engine) if config.device == "cpu" else 1  # copies on CPUs read through the same memory
    read = reads * _weight_bytes(config.engine) * model.parameters / speed.bytes_per_s
    compute = 2 * model.parameters * together / speed.flops
    return samples / together * config.sampling.max_new_tokens * (read + compute)


def _batch_size(config: RunConfig) -> int:
    """Sequences that the whole engine decodes together."""
    match config.engine.type:
        case "native":
            return config.engine.dp * config.engine.max_batch_size
        case "vllm":
            return config.engine.max_batch_size
        case _:
            return 1


def _copies(config: EngineConfig) -> int:
    """Of the weights that the engine holds; TP ranks share one."""
    return config.dp if config.type == "native" else 1


def engine_memory(config: EngineConfig, parameters: int) -> dict[str, float]:
    """Bytes by purpose that an engine holds all the time, on all of its ranks; none that is known of an adapter."""
    if config.type == "adapter":
        return {}
    memory = {"engine weights": float(_copies(config) * _weight_bytes(config) * parameters)}
    if config.type == "native":
        memory["KV cache"] = config.ranks * config.kv_cache_gib * GIB
        if config.ranks > 1:
            memory["worker processes"] = float(config.ranks * PROCESS_BYTES)
    elif config.type == "vllm":
        memory["KV cache"] = config.kv_cache_gib * GIB
    return memory


def _rollout_memory(config: RunConfig, model: ModelSize) -> dict[str, float]:
    """Of the engine, and of the weights on their way to it: full and fp32, during an update the old ones, too."""
    memory = engine_memory(config.engine, model.parameters)
    if config.engine.type == "native" and config.engine.ranks > 1:
        memory["staged weights"] = 2 * 4.0 * model.parameters
    return memory


def _trainer_memory(config: RunConfig, model: ModelSize) -> dict[str, float]:
    """Master weights, gradients and both AdamW moments are fp32."""
    memory = {
        "master weights": 4.0 * model.parameters,
        "gradients": 4.0 * model.parameters,
        "AdamW moments": 8.0 * model.parameters,
        "activations of a micro-batch": _activation_bytes(config, model),
    }
    if config.algorithm.kl.coefficient > 0:
        memory["reference weights"] = float(_trainer_bytes(config) * model.parameters)
    return memory


def _activation_bytes(config: RunConfig, model: ModelSize) -> float:
    """About 14 hidden and 4 intermediate vectors a layer and token are kept; one layer's with recomputation."""
    kept_layers = 1 if config.trainer.gradient_checkpointing else model.layers
    per_layer = 14 * model.hidden + 4 * model.intermediate
    inputs = model.layers * model.hidden if config.trainer.gradient_checkpointing else 0
    return config.trainer.micro_batch_tokens * _trainer_bytes(config) * (kept_layers * per_layer + inputs)


def _weight_bytes(config: EngineConfig) -> int:
    return BYTES[config.dtype] if config.type in ("native", "vllm", "hf") else 0


def _trainer_bytes(config: RunConfig) -> int:
    return 2 if config.trainer.precision == "bf16" else 4
