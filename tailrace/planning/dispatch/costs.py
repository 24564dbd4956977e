"""What an engine's steps cost, learned from the steps that it makes.

A decode step with B sequences and T cached tokens takes about base + each B + context T seconds. The three numbers are
fitted by least squares to the steps so far. For each size of batch, by powers of two, the newest steps count most, and
no size is forgotten while others are decoded. Relative errors count, so that small batches matter as much as large
ones. No number is below zero. This follows a machine whose pace changes, and engines that slow each other down, which a
profile that was measured before could not.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.planning.fits import non_negative

_FORGET = 0.99
"""The weight that a step keeps with each further step of its size."""
_LEAST_STEPS = 16
"""Fewer say nothing."""

_Array = npt.NDArray[np.float64]


NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a replica; see the module. These are `planning.latency.StepTimes` under any TP degree."""

    base: NotNegative
    """Seconds of a step."""
    each: NotNegative
    """Seconds for each sequence."""
    context: NotNegative
    """Seconds for each cached token."""
    prefill: NotNegative
    """Seconds for each token of a prompt."""

    def times(self, ratio: float) -> "StepCosts":
        """The costs of a machine that takes so many times as long for a decode step."""
        return StepCosts(
            base=ratio * self.base, each=ratio * self.each, context=ratio * self.context, prefill=self.prefill
        )

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """See `StepTimes`."""
        return self.base + self.each * batch_size + self.context * context_tokens

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return self.prefill * batch_size * rms_length


class ObservedSteps:
    """Fits `StepCosts` to steps."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Array] = {}
        """By the bits of B: [4, 4], the weighted sums of products of 1, B, T and seconds, as parts of the seconds."""
        self._decodes = 0
        self._prompts: _Array = np.zeros(5)
        """Of steps that computed prompts, the weighted sums of: those with sequences that decoded, B, T, seconds, and
        tokens of prompts."""

    def decoded(self, batch_size: int, context_tokens: int, seconds: float) -> None:
        """Take in a step in which all sequences of a replica decoded."""
        row = np.array([1.0, batch_size, context_tokens, seconds]) / seconds
        sums = self._sizes.setdefault(batch_size.bit_length(), np.zeros((4, 4)))
        sums *= _FORGET
        sums += np.multiply.outer(row, row)
        self._decodes += 1

    def prefilled(self, tokens: int, batch_size: int, context_tokens: int, seconds: float) -> None:
        """Take in a step that computed tokens of prompts, beside sequences that decoded."""
        self._prompts *= _FORGET
        self._prompts += (batch_size > 0, batch_size, context_tokens, seconds, tokens)

    @property
    def costs(self) -> StepCosts | None:
        """The costs as of now; None before there are enough steps."""
        if self._decodes < _LEAST_STEPS:
            return None
        sums = sum(list(self._sizes.values()), np.zeros((4, 4)))  # another thread may add a size
        base, each, context = non_negative(sums[:3, :3], sums[:3, 3])
        mixed, sequences, cached, seconds, tokens = self._prompts.tolist()
        beside_s = base * mixed + each * sequences + context * cached
        prefill = max(0.0, seconds - beside_s) / tokens if tokens else 0.0
        return StepCosts(base=base, each=each, context=context, prefill=prefill)


def fitted(decode: Iterable[tuple[float, float, float]], prefill: Iterable[tuple[float, float]]) -> StepCosts:
    """Fit the costs to points that were measured before.

    Args:
        decode: sequences, cached tokens and seconds of steps, one or more.
        prefill: tokens and seconds of computing prompts.
    """
    rows = np.array([(1.0, size, tokens, seconds) for size, tokens, seconds in decode])
    rows /= rows[:, -1:]
    sums = rows.T @ rows
    base, each, context = non_negative(sums[:3, :3], sums[:3, 3])
    tokens, seconds = (sum(column) for column in zip(*prefill, (0.0, 0.0), strict=True))
    return StepCosts(base=base, each=each, context=context, prefill=seconds / tokens if tokens else 0.0)
