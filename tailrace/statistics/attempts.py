"""What k answers to a prompt are worth, estimated from n of them that were drawn alike.

Each estimate is the mean over all choices of k of the n answers, so it is unbiased: pass@k after Chen et al. 2021,
"Evaluating Large Language Models Trained on Code", equation 1; maj@k after Wang et al. 2022, "Self-Consistency
Improves Chain of Thought Reasoning in Language Models".
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

MOST_VOTES = 64
"""The largest k of maj@k that is below n: beyond it the choices take too long to count."""

Array = npt.NDArray[np.float64]


def sizes(most: int) -> list[int]:
    """The k of pass@k and maj@k for `most` answers to a prompt: 2, 4, 8, … and `most`; none where that is below 2."""
    powers = {2**power for power in range(1, most.bit_length())}
    return sorted({k for k in powers if k < most} | ({most} if most > 1 else set()))


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that one of k answers is right, from `count` answers of which `right` are.

    It is 1 - C(count - right, k) / C(count, k).
    """
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def majority_at_k(votes: Sequence[tuple[str, bool]], k: int) -> float:
    """The chance that the answer that most of k responses give is right.

    A tie is decided by lot. An empty answer does not vote, and where none votes the majority is wrong. Where responses
    with equal answers are right and wrong, the answer is right in part.

    Args:
        votes: [n] the answer of each response, and whether it is right.
        k: at most n, and at most `MOST_VOTES` or n itself.
    """
    of_answer: dict[str, list[bool]] = {}
    for answer, is_right in votes:
        if answer:
            of_answer.setdefault(answer, []).append(is_right)
    counted = sorted((len(those), sum(those) / len(those)) for those in of_answer.values())
    largest = max((count for count, _ in counted), default=0)
    if k == len(votes):
        winners = [share for count, share in counted if count == largest]
        return sum(winners) / len(winners) if winners else 0.0
    won = sum(_won_with(most, counted, len(votes), k) for most in range(1, min(k, largest) + 1))
    return min(1.0, won / math.comb(len(votes), k))


def _won_with(most: int, counted: Sequence[tuple[int, float]], total: int, k: int) -> float:
    """The number of choices of k of `total` responses whose winners have `most` votes each. Each choice counts as much
    as its winners are right.

    `counted`: of each answer how many responses give it, and the part of them that is right. The answers that can have
    `most` votes are taken one after the other. `ways[t, s]` counts the choices of s of their responses with t winners;
    `worth[t, s]` counts the same, each by how right its winners are together.
    """
    rivals = [(count, share) for count, share in counted if count >= most]
    ways, worth = np.zeros((2, min(len(rivals), k // most) + 1, k + 1))
    ways[0, 0] = 1.0
    for count, share in rivals:
        loses, wins = _losing(count, most, k), float(math.comb(count, most))
        worth = worth @ loses + wins * _one_more_winner(worth + share * ways, most)
        ways = ways @ loses + wins * _one_more_winner(ways, most)
    others = total - sum(count for count, _ in rivals)
    rest = np.array([math.comb(others, k - chosen) for chosen in range(k + 1)], np.float64)
    return float((worth[1:] @ rest / np.arange(1, len(worth))).sum())


@lru_cache(maxsize=1024)
def _losing(count: int, most: int, k: int) -> Array:
    """[s, s'] the number of ways to come from s to s' chosen responses with fewer than `most` of `count` more."""
    chosen = np.zeros((k + 1, k + 1))
    for taken in range(min(most, k + 1)):
        np.fill_diagonal(chosen[:, taken:], float(math.comb(count, taken)))
    return chosen


def _one_more_winner(ways: Array, most: int) -> Array:
    """The ways, [t, s], with one more winner and its `most` responses, as far as there are so many at all."""
    return np.pad(ways, ((1, 0), (most, 0)))[: ways.shape[0], : ways.shape[1]]
