"""How many tokens unfinished responses will still make: estimates by name, for predicting what is left of a stage."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import ConfigError, did_you_mean
from tailrace.types import IntArray

LEAST_LENGTHS = 8
"""Responses that have to have finished before the survival curve says anything of the others."""
ROUNDING = 1e-9
"""Sequences; below which an expected number counts as equal to another."""


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is running or waiting."""

    context: int
    """Tokens of prompt and response now."""
    generated: int
    """Of these, the response's."""
    most: int
    """Tokens that it may still make: 1 or more."""
    expected: float | None = None
    """Tokens of the whole response that something expected before it began, a length ranking for one."""


class RemainingEstimate(Protocol):
    """Says what each unfinished response will still make."""

    name: str

    @property
    def ready(self) -> bool:
        """Whether it knows enough to be relied on."""
        ...

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """Tokens for each, from 1 to its `most`. Where nothing tells two apart, the one given first ends first."""
        ...


class LengthHistory:
    """The lengths of the responses that finished last."""

    def __init__(self, window: int = 2048) -> None:
        """`window`: how many are kept; older ones tell little of a policy that has changed since."""
        self._lengths: deque[int] = deque(maxlen=window)

    def add(self, tokens: int) -> None:
        """Keep the length of a response that finished; one that was aborted tells nothing."""
        self._lengths.append(tokens)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self) -> IntArray:
        """[S], in the order in which they finished."""
        return np.fromiter(self._lengths, np.int64, len(self._lengths))


class Bound:
    """Each reaches its maximum: conservative, and what PAT assumes (section 4.2, Online Switch Strategy)."""

    name = "bound"
    ready = True

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """See `RemainingEstimate`."""
        return [sequence.most for sequence in unfinished]


class Ranked:
    """Each makes what was expected of it before it began; one without an expectation reaches its maximum."""

    name = "ranked"
    ready = True

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """See `RemainingEstimate`. One that has outlived what was expected is taken to end at once."""
        return [
            s.most if s.expected is None else max(1, min(s.most, round(s.expected) - s.generated)) for s in unfinished
        ]


class Survival:
    """From the lengths that were seen: how a batch with this past typically drains.

    S(l), the share of responses longer than l, is the product-limit estimate (Kaplan and Meier 1958) over finished
    lengths, in which the unfinished ones count as longer than what they have. A response with g tokens makes more than
    t others with probability S(g + t) / S(g), and none beyond its maximum. Nothing is known beyond the longest finished
    length, so whoever gets there reaches its maximum.

    The sum of these is the expected number still active after t tokens, n(t). The k-th last is taken to end at the
    first t with n(t) < k - 1/2; who ends when goes by the expected remaining tokens. So the whole is neither every
    one's mean, which knows no tail, nor drawn at random, which would make decisions waver.
    """

    name = "survival"

    def __init__(self, history: LengthHistory) -> None:
        self._history = history

    @property
    def ready(self) -> bool:
        """See `RemainingEstimate`. With few lengths it would take nearly all responses for the longest possible."""
        return len(self._history) >= LEAST_LENGTHS

    def remaining(self, unfinished: Sequence[Unfinished]) -> list[int]:
        """See `RemainingEstimate`."""
        if not unfinished:
            return []
        kinds = [(sequence.generated, sequence.most) for sequence in unfinished]
        curve = survival_curve(
            self._history.lengths(),
            np.array([generated for generated, _ in kinds], np.int64),
            upto=max(generated + most for generated, most in kinds),
        )
        active = np.zeros(max(most for _, most in kinds) + 1)
        mean: dict[tuple[int, int], float] = {}
        for (generated, most), alike in Counter(kinds).items():
            still = curve[generated : generated + most] / curve[generated]
            active[:most] += alike * still
            mean[generated, most] = float(still.sum())
        count = len(kinds)
        below = np.arange(count, 0, -1) - 0.5 - ROUNDING
        ends = np.searchsorted(-active, -below, side="right")  # n(t) never rises
        remaining = [0] * count
        for index, end in zip(sorted(range(count), key=lambda i: mean[kinds[i]]), ends, strict=True):
            remaining[index] = min(int(end), kinds[index][1])
        return remaining


ESTIMATES = ("bound", "survival", "ranked")


def make_estimate(name: str, history: LengthHistory) -> RemainingEstimate:
    """The estimate of this name; `history` is kept and read at every call by those that use it.

    Raises:
        ConfigError: there is no such estimate.
    """
    match name:
        case "bound":
            return Bound()
        case "survival":
            return Survival(history)
        case "ranked":
            return Ranked()
        case _:
            raise ConfigError(
                f"{name!r} is no estimate of remaining tokens; there are {', '.join(ESTIMATES)}"
                f"{did_you_mean(name, ESTIMATES)}"
            )


def survival_curve(finished: IntArray, unfinished: IntArray, *, upto: int) -> npt.NDArray[np.float64]:
    """[upto + 1], the share of responses longer than 0, 1, … upto tokens (Kaplan and Meier 1958).

    Constant beyond the longest finished length. Above zero wherever an unfinished one has got to.

    Args:
        finished: [S], lengths.
        unfinished: [B], lengths so far: of responses that are longer than that.
    """
    size = upto + 2  # the last entry: whatever is longer
    ended = np.bincount(np.minimum(finished, upto + 1), minlength=size)
    seen = ended + np.bincount(np.minimum(unfinished, upto + 1), minlength=size)
    at_risk = np.cumsum(seen[::-1])[::-1]  # as long as this or longer, as far as is known
    ends_here = ended[:-1] / np.maximum(at_risk[:-1], 1)
    return np.cumprod(1.0 - ends_here, dtype=np.float64)
