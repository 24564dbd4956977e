"""Which devices generate, which train, and in which arrangement."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tailrace.config.base import GIB
from tailrace.config.cluster import ROLLOUT
from tailrace.config.hardware import DType
from tailrace.errors import PlanError
from tailrace.planning.hardware.base import Pool
from tailrace.planning.memory import CONTEXT_BYTES, RESERVED, Memory, engine_memory, trainer_memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.generation import ELEMENT_BYTES
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, MicroBatch, TrainingSetup

USED = 0.9
"""The part of a device's memory that an engine may have, as with vLLM's default."""
STEP_TOKENS = 8192
"""The most tokens of prompts in a step of an engine on an accelerator, where the recipe does not say."""
_STAGES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines that are alike, and their devices."""

    name: str = ROLLOUT
    """Of their pool in the recipe."""
    pool: Pool
    """Whose devices they have."""
    engines: int
    most: int | None = None
    """Where the run chooses their number: the most of them. There are devices for all of these."""
    tp: int = 1
    """Devices of a replica of the model."""
    dp: int = 1
    """Replicas of an engine."""
    slots: int
    """The most sequences that a replica decodes together."""
    step_tokens: int = STEP_TOKENS
    """The most tokens of prompts in a step."""
    block: int = 16
    """Tokens of a block of the cache."""
    dtype: DType = "bfloat16"
    """Of weights, keys and values."""
    cache_tokens: float
    """Room in the cache of a replica."""

    @property
    def most_engines(self) -> int:
        """The most engines that there may be."""
        return self.most or self.engines

    @property
    def devices(self) -> int:
        """Devices that generate, or may."""
        return self.most_engines * self.tp * self.dp

    def room(self, shape: ModelShape, *, tp: int | None = None, taken_bytes: float = 0.0) -> float:
        """Tokens that a replica's cache has room for, at its TP degree or another; see `engine_tokens`."""
        return engine_tokens(
            shape,
            self.pool,
            tp=tp or self.tp,
            step_tokens=self.step_tokens,
            slots=self.slots,
            taken_bytes=taken_bytes,
            dtype=self.dtype,
        )

    def memory(self, shape: ModelShape) -> Memory:
        """What each of its devices holds."""
        return engine_memory(
            shape,
            tp=self.tp,
            cache_tokens=self.cache_tokens,
            step_tokens=self.step_tokens,
            batch_size=self.slots,
            dtype=self.dtype,
        )

    @property
    def document(self) -> dict[str, Any]:
        """The same, for machines."""
        return {
            "pool": self.pool.name,
            "kind": self.pool.kind,
            "devices": self.devices,
            "engines": self.engines,
            "tp": self.tp,
            "dp": self.dp,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The devices of a run."""

    rollout: tuple[Engines, ...]
    """Those of each pool of the recipe; a plan has one."""
    trainer: Pool
    layout: Layout
    reference: Layout | None = None
    """The arrangement of the frozen model, on devices of the trainer's pool; None where there is none."""
    critic: Layout | None = None
    """The same of a critic, which is trained, too."""
    colocated: bool = False
    """Whether engines and trainer have the same devices, in turns."""

    @property
    def rollout_devices(self) -> int:
        """Devices that generate, or may."""
        return sum(one.devices for one in self.rollout)

    @property
    def devices(self) -> int:
        """Devices of the run."""
        others = [one.devices for one in (self.layout, self.reference, self.critic) if one is not None]
        if self.colocated:
            return max(self.rollout_devices, *others)
        return self.rollout_devices + sum(others)

    @property
    def trainer_devices(self) -> int:
        """Devices of the trainer's pool that are not an engine's, too."""
        return self.devices - self.rollout_devices

    @property
    def usd_per_hour(self) -> float:
        """Price of the devices for an hour."""
        generating = sum(one.devices * one.pool.usd_per_hour for one in self.rollout)
        return generating + self.trainer_devices * self.trainer.usd_per_hour

    @property
    def of_trainer(self) -> dict[str, Any]:
        """The devices that train, for machines."""
        return {
            "pool": self.trainer.name,
            "kind": self.trainer.kind,
            "devices": self.layout.devices,
            **asdict(self.layout),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What a trainer computes in a step, in the mean."""

    tokens: float
    """Of all samples; a prompt that a group shares counts once."""
    mean_length: float
    """Of a sequence, weighted by its tokens: by this many tokens does a token's attention grow."""
    micro_batch_tokens: int
    longest: int
    """Tokens of the longest sample with its prompt, which is a micro-batch by itself where it is the longer one."""

    def micro_batches(self, dp: int) -> list[MicroBatch]:
        """Those of a rank."""
        own = self.tokens / dp
        count = max(1, math.ceil(own / self.micro_batch_tokens))
        return [MicroBatch(tokens=own / count, squares=own / count * self.mean_length)] * count

    @property
    def largest(self) -> MicroBatch:
        """The one that takes the most memory: a step may have fewer tokens than are allowed."""
        tokens = max(min(self.micro_batch_tokens, math.ceil(self.tokens)), self.longest)
        return MicroBatch(tokens=tokens, squares=float(tokens) * self.longest)


def engine_tokens(
    shape: ModelShape,
    pool: Pool,
    *,
    tp: int,
    step_tokens: float,
    slots: int,
    taken_bytes: float = 0.0,
    dtype: DType = "bfloat16",
) -> float:
    """Tokens that a replica's cache has room for; 0 or less where the weights alone do not fit.

    `taken_bytes`: those of a trainer on the same device.
    """
    memory = engine_memory(shape, tp=tp, cache_tokens=0, step_tokens=step_tokens, batch_size=slots, dtype=dtype)
    left = USED * pool.device.memory_bytes - memory.peak - taken_bytes * RESERVED - CONTEXT_BYTES
    return left / shape.cache_bytes(tp=tp, element_bytes=ELEMENT_BYTES[dtype])


def tp_degrees(shape: ModelShape, pool: Pool) -> list[int]:
    """The TP degrees of a model within a node, ascending.

    They divide the node, so that no replica has devices of two. Where there is one node alone, they may also be powers
    of two that leave some of its devices for other workers.
    """
    return [
        tp
        for tp in range(1, pool.per_node + 1)
        if shape.heads % tp == 0 and (pool.per_node % tp == 0 or (pool.nodes == 1 and tp & (tp - 1) == 0))
    ]


def least_tp(like: Engines, shape: ModelShape, *, tokens: int) -> int:
    """The least TP degree under which an engine holds the weights and a response of so many tokens.

    Raises:
        PlanError: there is none within a node.
    """
    pool, degrees = like.pool, tp_degrees(shape, like.pool)
    for tp in degrees:
        if like.room(shape, tp=tp) >= tokens:
            return tp
    most = degrees[-1]
    lacking = (
        (tokens - like.room(shape, tp=most)) * shape.cache_bytes(tp=most, element_bytes=ELEMENT_BYTES[like.dtype]) / GIB
    )
    raise PlanError(
        f"an engine of {shape.name} with room for {tokens} tokens lacks {lacking:.1f} GiB on each of {most} "
        f"{pool.kind}, the most of a node that its {shape.heads} heads can be split among; use devices with more memory"
    )


def layouts(shape: ModelShape, pool: Pool, devices: int) -> Iterator[Layout]:
    """Yield the arrangements of a trainer on so many devices: TP within a node, stages, and DP over what is left."""
    for tp in tp_degrees(shape, pool):
        if devices % tp:
            continue
        for pp in _STAGES:
            if pp > shape.layers or devices % (tp * pp):
                continue
            dp = devices // (tp * pp)
            for sharding in ("none", "optimizer", "full") if dp > 1 else ("none",):
                for checkpointing in ("none", "full"):
                    yield Layout(tp=tp, pp=pp, dp=dp, sharding=sharding, checkpointing=checkpointing)


def best_layout(
    shape: ModelShape, pool: Pool, devices: int, batches: Batches, dtype: DType = "bfloat16"
) -> tuple[Layout, float]:
    """Return the quickest arrangement whose memory fits, and its seconds of a mean step.

    `dtype`: in which layers compute.

    Raises:
        PlanError: none fits; the message says by how much the nearest one does not.
    """
    best: tuple[Layout, float] | None = None
    nearest: Memory | None = None
    for layout in layouts(shape, pool, devices):
        setup = TrainingSetup(shape=shape, layout=layout, dtype=dtype)
        memory = trainer_memory(setup, batches.largest)
        if not memory.fits(pool.device):
            nearest = memory if nearest is None or memory.peak < nearest.peak else nearest
            continue
        seconds = AnalyticTrainingTimes(setup, pool).step_s(batches.micro_batches(layout.dp))
        if best is None or seconds < best[1]:
            best = layout, seconds
    if best is None:
        assert nearest is not None, "there is a layout for any number of devices"
        nearest.check(pool.device, f"each of {devices} {pool.kind}")
    assert best is not None
    return best


def mean_batches(
    groups: Sequence[tuple[int, Sequence[int]]], *, groups_per_step: int, micro_batch_tokens: int
) -> Batches:
    """Return what a step of a workload has in the mean.

    Args:
        groups: tokens of the prompt and of each response, of several steps' groups.
    """
    tokens = sum(prompt + sum(responses) for prompt, responses in groups)
    pairs = sum(prompt**2 + sum(n * (2 * prompt + n) for n in responses) for prompt, responses in groups)
    return Batches(
        tokens=tokens / len(groups) * groups_per_step,
        mean_length=pairs / tokens,
        micro_batch_tokens=micro_batch_tokens,
        longest=max(prompt + max(responses) for prompt, responses in groups),
    )
