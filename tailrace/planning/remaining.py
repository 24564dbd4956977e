"""Estimates of how many tokens unfinished responses will still make, for predicting the rest of a stage."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import ConfigError, did_you_mean
from tailrace.types import IntArray

LEAST_LENGTHS = 8
"""Responses that must have finished before the survival curve is used for the others."""
MOST_POINTS = 2048
"""Most tokens after which the number of active responses is computed; longer responses are looked at in strides."""
ROUNDING = 1e-9
"""Difference in sequences below which two expected numbers count as equal."""


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is running or waiting."""

    context: int
    """Present number of tokens of prompt and response."""
    generated: int
    """The number of these that are of the response."""
    most: int
    """The most tokens that it may still make: 1 or more."""
    expected: float | None = None
    """Tokens of the whole response that were expected before it began, for example by a length ranking."""
    group: int = -1
    shared: int = 0
    """Tokens at the beginning of the context whose keys and values a replica has once for all of the group."""
    trains: bool = True
    """Whether it is trained on. Others have other lengths, such as the greedy ones of evaluations."""


class RemainingEstimate(Protocol):
    """An estimate of the tokens that each unfinished response will still make."""

    name: str

    @property
    def ready(self) -> bool:
        """Whether it knows enough to be relied on."""
        ...

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """Tokens for each, from 1 to its `most`. Of two that nothing tells apart, the one given first ends first."""
        ...


class LengthHistory:
    """The lengths of the newest finished responses."""

    def __init__(self, window: int = 2048) -> None:
        """`window`: the number of lengths that are kept. Older ones tell little of a policy that has changed since."""
        self._lengths: deque[int] = deque(maxlen=window)

    def add(self, tokens: int) -> None:
        """Keep the length of a finished response. An aborted one tells nothing and is not added."""
        self._lengths.append(tokens)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self) -> IntArray:
        """[S] lengths, in the order in which the responses finished."""
        return np.fromiter(self._lengths, np.int64, len(self._lengths))


class Bound:
    """Each response reaches its maximum: conservative, and PAT's assumption (section 4.2, Online Switch Strategy)."""

    name = "bound"
    ready = True

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """See `RemainingEstimate`."""
        return [sequence.most for sequence in unfinished]


class Ranked:
    """Each response makes the tokens that were expected before it began; without an expectation, its maximum."""

    name = "ranked"
    ready = True

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """See `RemainingEstimate`. A response that has outlived its expectation is assumed to end at once."""
        return [
            s.most if s.expected is None else max(1, min(s.most, round(s.expected) - s.generated)) for s in unfinished
        ]


class Survival:
    """An estimate from the lengths seen so far: how a batch with this past typically drains.

    S(l), the share of responses longer than l, is the product-limit estimate (Kaplan and Meier 1958) over finished
    lengths. The unfinished responses count as longer than their present length. A response with g tokens makes more
    than t further ones with probability S(g + t) / S(g), and none beyond its maximum. Nothing is known beyond the
    longest finished length, so a response that gets there is assumed to reach its maximum. Responses that are not
    trained on have a curve of their own. Each kind has that of the other one until enough of it have finished.

    The sum of these is n(t), the expected number still active after t tokens. The k-th last response is assumed to end
    at the first t with n(t) < k - 1/2. Responses are assigned to these ends by their expected remaining tokens. The
    result is neither each one's mean, which has no tail, nor drawn at random, which would make decisions waver.
    """

    name = "survival"

    def __init__(self, history: LengthHistory, others: LengthHistory | None = None) -> None:
        """`others`: the lengths of responses that are not trained on."""
        self._history = history
        self._others = LengthHistory() if others is None else others

    @property
    def ready(self) -> bool:
        """See `RemainingEstimate`. From few lengths it would assume nearly all responses to be the longest possible."""
        return max(len(self._history), len(self._others)) >= LEAST_LENGTHS

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """See `RemainingEstimate`."""
        kinds = {trains: [s for s in unfinished if s.trains is trains] for trains in (True, False)}
        ends = {trains: iter(self._remaining(own, self._lengths(trains))) for trains, own in kinds.items() if own}
        return [next(ends[sequence.trains]) for sequence in unfinished]

    def _lengths(self, trains: bool) -> IntArray:
        own, other = (self._history, self._others) if trains else (self._others, self._history)
        return (own if len(own) >= LEAST_LENGTHS or len(own) >= len(other) else other).lengths()

    def _remaining(self, unfinished: Sequence[Unfinished], finished: IntArray) -> list[int]:
        kinds = [(sequence.generated, sequence.most) for sequence in unfinished]
        curve = survival_curve(
            finished,
            np.array([generated for generated, _ in kinds], np.int64),
            upto=max(generated + most for generated, most in kinds),
        )
        longest = max(most for _, most in kinds)
        stride = 1 + longest // MOST_POINTS
        active = np.zeros(longest // stride + 2)  # n(0), n(stride), …
        strides = [np.ascontiguousarray(curve[first::stride]) for first in range(stride)]  # added up twice as fast
        for (generated, most), alike in Counter(kinds).items():
            first, points = generated // stride, -(-most // stride)
            still = strides[generated % stride][first : first + points]
            active[:points] += still * (alike / curve[generated])
        generated_B, most_B = np.array(kinds).T
        sums = np.concatenate(([0.0], np.cumsum(curve)))
        mean_B = (sums[generated_B + most_B] - sums[generated_B]) / curve[generated_B]
        below = np.arange(len(kinds), 0, -1) - 0.5 - ROUNDING
        ends = stride * np.searchsorted(-active, -below, side="right")  # n(t) never rises
        remaining_B = np.empty_like(most_B)
        remaining_B[np.argsort(mean_B, kind="stable")] = ends
        remaining: list[int] = np.minimum(remaining_B, most_B).tolist()
        return remaining


ESTIMATES = ("bound", "survival", "ranked")


def make_estimate(name: str, history: LengthHistory, others: LengthHistory | None = None) -> RemainingEstimate:
    """The estimate of this name. Estimates that use lengths keep both histories and read them at every call.

    `others`: the lengths of responses that are not trained on.

    Raises:
        ConfigError: there is no such estimate.
    """
    match name:
        case "bound":
            return Bound()
        case "survival":
            return Survival(history, others)
        case "ranked":
            return Ranked()
        case _:
            raise ConfigError(
                f"{name!r} is no estimate of remaining tokens; there are {', '.join(ESTIMATES)}"
                f"{did_you_mean(name, ESTIMATES)}"
            )


def survival_curve(finished: IntArray, unfinished: IntArray, *, upto: int) -> npt.NDArray[np.float64]:
    """[upto + 1] shares of responses longer than 0, 1, … upto tokens (Kaplan and Meier 1958).

    Constant beyond the longest finished length. Above zero at every length that an unfinished response has reached.

    Args:
        finished: [S], lengths.
        unfinished: [B], lengths so far, of responses that will be longer.
    """
    size = upto + 2  # the last entry counts all longer ones
    ended = np.bincount(np.minimum(finished, upto + 1), minlength=size)
    seen = ended + np.bincount(np.minimum(unfinished, upto + 1), minlength=size)
    at_risk = np.cumsum(seen[::-1])[::-1]  # known to be this long or longer
    ends_here = ended[:-1] / np.maximum(at_risk[:-1], 1)
    return np.cumprod(1.0 - ends_here, dtype=np.float64)
