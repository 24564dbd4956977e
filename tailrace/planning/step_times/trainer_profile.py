"""A trainer's times, measured on the machine: the profiled half of AsyncFlow's cost model (section 4.3).

A forward and backward pass over a micro-batch takes base + token T + scored N + pair P seconds: T tokens of which N are
of responses, whose logits are computed, and P pairs of a token and one that it attends to. The four numbers are the
best ones of which none is negative, by relative error.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from scipy.optimize import nnls

from tailrace.planning.dispatch.costs import NotNegative
from tailrace.planning.packing import GroupPart


class MicroBatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-batch, and the seconds that it took."""

    tokens: Annotated[int, msgspec.Meta(ge=1)]
    scored: Annotated[int, msgspec.Meta(ge=0)]
    pairs: NotNegative
    seconds: Annotated[float, msgspec.Meta(gt=0)]

    @classmethod
    def of(cls, parts: Sequence[GroupPart], seconds: float) -> "MicroBatchPoint":
        """The point of a micro-batch that took so long."""
        tokens, scored, pairs = _amounts(parts)
        return cls(tokens=tokens, scored=scored, pairs=pairs, seconds=seconds)


Points = Annotated[list[MicroBatchPoint], msgspec.Meta(min_length=1)]
"""One at least."""


class TrainerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one trainer; see `tailrace profile trainer`."""

    model: str
    hardware: str
    precision: str
    threads: Annotated[int, msgspec.Meta(ge=1)]
    update: Points
    """Forward and backward passes."""
    score: Points
    """Log-probabilities."""
    optimizer_s: NotNegative
    """Seconds of an optimizer step."""
    weights_s: NotNegative
    """Seconds to publish all weights, in the dtype in which they travel."""


class ProfiledTrainer:
    """A trainer that takes as long as the one of a profile."""

    def __init__(self, profile: TrainerProfile, *, gives_values: bool = False) -> None:
        """`gives_values`: whether it is a critic of the same model: one value takes no time, in the place of logits."""
        self._update = _Fit(profile.update, has_logits=not gives_values)
        self._score = _Fit(profile.score, has_logits=not gives_values)
        self._optimizer_s = profile.optimizer_s

    def update_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """Seconds of the forward and backward passes over a micro-batch."""
        return self._update.seconds(micro_batch)

    def score_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """Seconds of the log-probabilities of a micro-batch."""
        return self._score.seconds(micro_batch)

    def optimizer_s(self) -> float:
        """Seconds of an optimizer step."""
        return self._optimizer_s

    @property
    def error(self) -> float:
        """The root mean square of the relative errors of the fit to its own points."""
        return max(self._update.error, self._score.error)


class _Fit:
    def __init__(self, points: Sequence[MicroBatchPoint], *, has_logits: bool) -> None:
        self._has_logits = has_logits
        rows = np.array([(1.0, point.tokens, point.scored, point.pairs) for point in points])
        seconds = np.array([point.seconds for point in points])
        scale = rows.max(axis=0)  # columns differ by orders of magnitude
        found, residual = nnls(rows / scale / seconds[:, None], np.ones(len(points)))
        self._costs: list[float] = (found / scale).tolist()
        self.error = float(residual / len(points) ** 0.5)

    def seconds(self, parts: Sequence[GroupPart]) -> float:
        base, token, scored, pair = self._costs
        tokens, of_responses, pairs = _amounts(parts)
        return base + token * tokens + scored * of_responses * self._has_logits + pair * pairs


def _amounts(parts: Sequence[GroupPart]) -> tuple[int, int, float]:
    tokens = sum(part.tokens for part in parts)
    scored = tokens - sum(part.prompt_tokens for part in parts)
    return tokens, scored, sum(part.pairs for part in parts)
