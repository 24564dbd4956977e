"""Chooses which samples of a batch are computed together, from their lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from tailrace.planning.balance import partition

_PIECES = 2
"""The least number of pieces of a rank's share, so that shares differ by less than a piece."""


class Lengths(NamedTuple):
    """The lengths of a sample."""

    group: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Samples of one group that share one copy of their prompt."""

    samples: tuple[int, ...]
    """Their places among those that were planned."""
    prompt_tokens: int
    response_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens: the prompt once, and every response."""
        return self.prompt_tokens + sum(self.response_tokens)

    @property
    def pairs(self) -> float:
        """Pairs of a token and one that it attends to."""
        prompt = self.prompt_tokens
        return prompt * prompt / 2 + sum(tokens * (prompt + tokens / 2) for tokens in self.response_tokens)


def plan_micro_batches(samples: Sequence[Lengths], budget: int) -> list[list[GroupPart]]:
    """Split samples into micro-batches of at most `budget` tokens, in the order given, by next-fit.

    Neighbours of equal `group` form a group. A group stays whole if it fits into one micro-batch; a larger one is
    split, each part repeating the prompt. A sample that exceeds the budget stands alone. Samples without any response
    token have nothing to score and are left out.

    Next-fit never looks back at a closed micro-batch. So planning a prefix that ends where a micro-batch ends, and then
    the rest, gives the same micro-batches as planning everything at once.
    """
    batches: list[list[GroupPart]] = []
    room = 0
    for part in _parts(samples, budget):
        if not batches or part.tokens > room:
            batches.append([])
            room = budget
        batches[-1].append(part)
        room -= part.tokens
    return batches


def shared(samples: Sequence[Lengths], ranks: int) -> list[list[int]]:
    """Share samples among ranks, so that each has about as many tokens. A group stays together as far as that allows.

    A group is cut into pieces of at most half of a rank's share, each of which repeats the prompt.

    Returns:
        For each rank the places of its samples, ascending.
    """
    if ranks == 1:
        return [list(range(len(samples)))]
    most = sum(sample.response_tokens for sample in samples) / ranks / _PIECES
    pieces = list(_parts(samples, max(1, int(most))))
    shares = partition([piece.tokens for piece in pieces], ranks, equal_count=False)
    return [sorted(index for piece in share for index in pieces[piece].samples) for share in shares]


def rank_micro_batches(samples: Sequence[Lengths], ranks: int, budget: int) -> list[list[list[GroupPart]]]:
    """The micro-batches of each of several ranks that share samples; see `shared` and `plan_micro_batches`."""
    return [plan_micro_batches([samples[index] for index in share], budget) for share in shared(samples, ranks)]


def _parts(samples: Sequence[Lengths], budget: int) -> Iterator[GroupPart]:
    scored = [index for index, sample in enumerate(samples) if sample.response_tokens]
    for _, group in groupby(scored, key=lambda index: samples[index].group):
        yield from _split(samples, list(group), budget)


def _split(samples: Sequence[Lengths], group: Sequence[int], budget: int) -> Iterator[GroupPart]:
    prompt = samples[group[0]].prompt_tokens
    taken: list[int] = []
    tokens = prompt
    for index in group:
        response = samples[index].response_tokens
        if taken and tokens + response > budget:
            yield _part(samples, taken)
            taken, tokens = [], prompt
        taken.append(index)
        tokens += response
    yield _part(samples, taken)


def _part(samples: Sequence[Lengths], taken: Sequence[int]) -> GroupPart:
    return GroupPart(
        tuple(taken), samples[taken[0]].prompt_tokens, tuple(samples[index].response_tokens for index in taken)
    )
