"""Running sequences when the TP degree changes: the replicas that get them, and the bytes that move.

Ranks exchange weights in groups of lcm(old degree, new degree), and so they do with caches. A sequence that leaves its
group takes another exchange, among all ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Generic, NamedTuple, TypeVar

from tailrace.planning.drain import Held, Work
from tailrace.planning.remaining import Unfinished

Item = TypeVar("Item")


class Merged(NamedTuple, Generic[Item]):
    """Running sequences in another arrangement."""

    replicas: list[list[Item]]
    """The sequences of each of the N / target replicas."""
    across: list[list[Item]]
    """For each old replica, those of its sequences that leave the group of ranks that exchange weights."""


def merge(replicas: Sequence[Sequence[Item]], tp: int, target: int, *, tokens: Callable[[Item], int]) -> Merged[Item]:
    """Distribute running sequences over all replicas of another degree, with the same ranks (PAT, Algorithm 1, line 7).

    The numbers of sequences differ by at most one. As many sequences as that allows stay within their group of
    lcm(tp, target) ranks; those with the fewest context tokens leave it. Within a group, replicas that become one keep
    their sequences. Those of replicas that become several are dealt out so that context tokens differ little.

    Args:
        replicas: of degree `tp`. At the same degree they stay as they are.
        tokens: returns the context tokens of a sequence.
    """
    across: list[list[Item]] = [[] for _ in replicas]
    if tp == target:
        return Merged([list(running) for running in replicas], across)
    exchange = math.lcm(tp, target)
    sources, parts = exchange // tp, exchange // target
    assert len(replicas) % sources == 0, f"{len(replicas)} replicas of TP {tp} cannot change to TP {target}"

    def held(origin: tuple[int, Item]) -> int:
        return tokens(origin[1])

    origins = [[(index, sequence) for sequence in running] for index, running in enumerate(replicas)]
    merged: list[list[tuple[int, Item]]] = []
    for first in range(0, len(replicas), sources):
        pool = [origin for running in origins[first : first + sources] for origin in running]
        merged += [pool] if parts == 1 else _deal(pool, parts, held)
    for index, sequence in _level(merged, held):
        across[index].append(sequence)
    return Merged([[sequence for _, sequence in running] for running in merged], across)


def _deal(pool: Sequence[Item], parts: int, tokens: Callable[[Item], int]) -> list[list[Item]]:
    """Deal the largest first, each to the part with the fewest sequences; of equal ones, with the fewest tokens."""
    dealt: list[list[Item]] = [[] for _ in range(parts)]
    held = [0] * parts
    for sequence in sorted(pool, key=tokens, reverse=True):
        index = min(range(parts), key=lambda i: (len(dealt[i]), held[i]))
        dealt[index].append(sequence)
        held[index] += tokens(sequence)
    return dealt


def _level(replicas: Sequence[list[Item]], tokens: Callable[[Item], int]) -> list[Item]:
    """Move the smallest sequences from the fullest replica to the emptiest, until numbers differ by one at most."""
    moved: list[Item] = []
    while True:
        emptiest, fullest = min(replicas, key=len), max(replicas, key=len)
        if len(fullest) - len(emptiest) <= 1:
            return moved
        moved.append(fullest.pop(min(range(len(fullest)), key=lambda i: tokens(fullest[i]))))
        emptiest.append(moved[-1])


def sent_bytes(cached: Sequence[Iterable[int]], tp: int, kv_bytes_per_token: int) -> float:
    """Bytes of keys and values of the rank that sends most (PAT, eq. 1). Others wait for it in the exchange.

    cached: tokens of each sequence of each replica; see `counted_once`.
    """
    return max(map(sum, cached)) * kv_bytes_per_token / tp


def counted_once(
    sequences: Sequence[Unfinished], remaining: Sequence[int], *, held: Set[int] = frozenset()
) -> list[int]:
    """The cached tokens of each sequence of a replica, where a group's prompt counts for the one that ends last.

    Args:
        remaining: the tokens that each will still make.
        held: groups whose prompts are counted elsewhere.
    """
    last: dict[int, int] = {}
    for place, sequence in enumerate(sequences):
        if sequence.shared and remaining[place] > remaining[last.setdefault(sequence.group, place)]:
            last[sequence.group] = place
    if not last:
        return [sequence.context for sequence in sequences]
    return [
        sequence.context
        - (sequence.shared if sequence.group in held or last.get(sequence.group, place) != place else 0)
        for place, sequence in enumerate(sequences)
    ]


def context(work: Work) -> int:
    """The context tokens of a sequence."""
    return work[0]


def held_context(held: Held) -> int:
    """The context tokens of a running sequence."""
    return held[0][0]
