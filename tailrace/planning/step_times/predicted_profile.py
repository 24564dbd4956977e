"""What `tailrace profile tp` would find of engines that are not there, by predicted steps.

A switch gathers the weights of a replica among its ranks, unless each rank has all of them, and copies what a rank
keeps. Keys and values are exchanged among all ranks that meet. These are assumed to cost nothing: the communication
groups of another degree, which are made once, and what a switch takes beside its bytes.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import lcm

from tailrace.config.hardware import DType
from tailrace.planning.hardware.base import Pool
from tailrace.planning.latency import StepTimes
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.collectives import Group, all_gather_s
from tailrace.planning.step_times.generation import ELEMENT_BYTES
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, ProfileKey, SwitchCost, TPProfile, grid

_PREFILLS = 6
"""Points of prefills for each degree."""
_MOVED = 2**30
"""Bytes of a rank for which the rate of keys and values is taken; with so many, latencies hardly count."""


def predicted_profile(
    times: StepTimes,
    shape: ModelShape,
    pool: Pool,
    *,
    ranks: int,
    cache_tokens: Mapping[int, float],
    slots: int,
    longest: int,
    step_tokens: int,
    dtype: DType = "bfloat16",
) -> TPProfile:
    """Return the profile of an engine of so many devices of a pool.

    Args:
        times: its steps. Replicas are taken not to disturb each other.
        cache_tokens: tokens that a replica's cache holds, by each degree to profile.
        slots: the most sequences that a replica decodes together.
        longest: tokens of the longest sequence that is profiled; times go on beyond it as between the last two points.
        step_tokens: the most tokens of prompts in a step.
        dtype: of the weights.
    """
    budget, weights = int(max(cache_tokens.values())), ELEMENT_BYTES[dtype] * shape.parameters
    decode = [(tp, *point) for tp in cache_tokens for point in grid(budget, slots, longest)]
    prefill = [(tp, *point) for tp in cache_tokens for point in grid(step_tokens, slots, longest, points=_PREFILLS)]
    return TPProfile(
        key=_key(shape, pool, ranks, dtype),
        created="",
        tailrace="",
        token_budget=budget,
        decode=tuple(_decode(times, *point) for point in decode),
        prefill=tuple(_prefill(times, *point) for point in prefill),
        switches=tuple(_switch(pool, weights, *pair) for pair in permutations(cache_tokens, 2)),
        group_s={tp: 0.0 for tp in cache_tokens if tp > 1},
    )


def _key(shape: ModelShape, pool: Pool, ranks: int, dtype: DType) -> ProfileKey:
    return ProfileKey(
        model=shape.name,
        architecture={"layers": shape.layers, "hidden_size": shape.hidden, "kv_heads": shape.kv_heads},
        dtype=dtype,
        ranks=ranks,
        threads_per_rank=1,
        hardware=pool.kind,
        cores=1,
        backend="predicted",
        collectives="predicted",
    )


def _decode(times: StepTimes, tp: int, size: int, length: int) -> DecodePoint:
    tokens = size * length
    seconds = times.step_s(tp, size, tokens, 1)
    return DecodePoint(tp=tp, replicas=1, batch_size=size, context_tokens=tokens, seconds=seconds)


def _prefill(times: StepTimes, tp: int, size: int, length: int) -> PrefillPoint:
    return PrefillPoint(tp=tp, batch_size=size, length=length, seconds=times.prefill_s(tp, size, length))


def _switch(pool: Pool, weights: float, source: int, target: int) -> SwitchCost:
    """`weights`: bytes of all."""
    meet = lcm(source, target)
    copied = 2 * weights / target  # read and written
    return SwitchCost(
        source_tp=source,
        target_tp=target,
        reshard_s=all_gather_s(weights, Group.of(pool, source)) + copied / (pool.device.memory_gb_s * 1e9),
        rest_s=0.0,
        kv_bytes_per_s=_MOVED / all_gather_s(meet * _MOVED, Group.of(pool, meet)),
    )


def degrees_of(shape: ModelShape, ranks: int) -> Sequence[int]:
    """The TP degrees that so many ranks can be arranged in."""
    return [tp for tp in range(1, ranks + 1) if ranks % tp == 0 and shape.heads % tp == 0]
