"""Running sequences when the TP degree changes: the replicas that get them, and the bytes that move."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from tailrace.planning.drain import Work

Item = TypeVar("Item")


def merge(
    replicas: Sequence[Sequence[Item]], tp: int, target: int, *, tokens: Callable[[Item], int]
) -> list[list[Item]]:
    """Distribute running sequences over the replicas of another degree, with the same ranks.

    Ranks exchange state in groups of lcm(tp, target), so sequences stay within their group. Replicas that become one
    keep their sequences. The sequences of a replica that becomes several are dealt out: their numbers differ by at most
    one, and then their context tokens differ little.

    Args:
        replicas: of degree `tp`.
        tokens: returns the context tokens of a sequence.

    Returns:
        N / target lists.
    """
    if tp == target:
        return [list(running) for running in replicas]
    exchange = math.lcm(tp, target)
    sources, parts = exchange // tp, exchange // target
    assert len(replicas) % sources == 0, f"{len(replicas)} replicas of TP {tp} cannot change to TP {target}"
    merged: list[list[Item]] = []
    for first in range(0, len(replicas), sources):
        pool = [sequence for running in replicas[first : first + sources] for sequence in running]
        merged += [pool] if parts == 1 else _deal(pool, parts, tokens)
    return merged


def _deal(pool: Sequence[Item], parts: int, tokens: Callable[[Item], int]) -> list[list[Item]]:
    """Deal the largest first, each to the part with the fewest sequences; of equal ones, with the fewest tokens."""
    dealt: list[list[Item]] = [[] for _ in range(parts)]
    held = [0] * parts
    for sequence in sorted(pool, key=tokens, reverse=True):
        index = min(range(parts), key=lambda i: (len(dealt[i]), held[i]))
        dealt[index].append(sequence)
        held[index] += tokens(sequence)
    return dealt


def sent_bytes(running: Sequence[Sequence[Work]], tp: int, kv_bytes_per_token: int) -> float:
    """Bytes of keys and values of the rank that sends most (PAT, eq. 1). Others wait for it in the exchange."""
    return max(sum(map(context, works)) for works in running) * kv_bytes_per_token / tp


def context(work: Work) -> int:
    """The context tokens of a sequence."""
    return work[0]
