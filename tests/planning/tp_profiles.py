"""Profiles made from formulas, so that expected times can be worked out by hand."""

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, ProfileKey, SwitchCost, TPProfile

StepFormula = Callable[[int, int, int, int], float]
"""The seconds of a decode step, by (tp, batch size, context tokens, replicas)."""

KEY = ProfileKey(
    model="tiny",
    architecture={"layers": 2, "hidden_size": 64, "kv_heads": 2},
    dtype="bfloat16",
    ranks=2,
    threads_per_rank=1,
    hardware="a CPU",
    cores=2,
    backend="cpu",
    collectives="shared_memory",
)


def made_profile(step: StepFormula, *, ranks: int = 2, degrees: Sequence[int] = (1, 2), **changes: Any) -> TPProfile:
    """A profile with decode points from `step`.

    Prefilling takes 1 ms a token. Every switch takes 0.1 s for weights, 0.02 s for the rest and 0.05 s for groups, and
    moves 1e9 bytes a second.
    """
    fields: dict[str, Any] = {
        "key": made_key(ranks=ranks),
        "created": "2026-01-01T00:00:00+00:00",
        "tailrace": "0",
        "token_budget": 4096,
        "decode": tuple(
            DecodePoint(tp=tp, replicas=replicas, batch_size=size, context_tokens=size * length, seconds=seconds)
            for tp in degrees
            for replicas in sorted({1, ranks // tp})
            for size in (1, 4, 16)
            for length in (16, 64, 256)
            for seconds in [step(tp, size, size * length, replicas)]
        ),
        "prefill": tuple(
            PrefillPoint(tp=tp, batch_size=size, length=length, seconds=1e-3 * size * length)
            for tp in degrees
            for size in (1, 4, 16)
            for length in (16, 256)
        ),
        "switches": tuple(
            SwitchCost(source_tp=source, target_tp=target, reshard_s=0.1, rest_s=0.02, kv_bytes_per_s=1e9)
            for source in degrees
            for target in degrees
            if source != target
        ),
        "group_s": {degree: 0.05 for degree in degrees if degree > 1},
    }
    return TPProfile(**(fields | changes))


def made_key(**changes: Any) -> ProfileKey:
    """`KEY`, with `changes` to its fields."""
    return ProfileKey(**({name: getattr(KEY, name) for name in KEY.__struct_fields__} | changes))


def flat(seconds: dict[int, float], a_sequence: float = 1e-3) -> StepFormula:
    """A step takes `seconds[tp]`, plus `a_sequence` seconds a sequence, whatever the context and the other replicas."""
    return lambda tp, size, tokens, replicas: seconds[tp] + a_sequence * size
