"""What step times rest on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from tailrace.planning.step_times.base import MixedStepTimes

Kind = Literal["analytic", "profiled", "kernels", "calibrated"]


DRIFT = 0.05
"""The relative error where a point was measured: machines drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What step times rest on, and how far they may be from the truth."""

    kind: Kind
    error: float
    """Relative error that nine of ten steps are within, where the source was fitted or checked."""

    def interval(self, seconds: float) -> tuple[float, float]:
        """The least and the most seconds that are to be expected where `seconds` are predicted."""
        return seconds / (1 + self.error), seconds * (1 + self.error)


def within(errors: Iterable[float]) -> float:
    """The relative error that nine of ten are within, of logarithms of predicted over measured; 0 of none."""
    ordered = sorted(map(abs, errors))
    return math.expm1(ordered[math.ceil(0.9 * len(ordered)) - 1]) if ordered else 0.0


class Source(MixedStepTimes, Protocol):
    """Step times that say what they rest on."""

    @property
    def basis(self) -> Basis:
        """What they rest on."""
        ...
