"""How an amount moves over the steps: a steady drift, and a change from one regime to another.

Both tests look at ranks only, so neither a few long responses nor the shape of the distribution sways them. PolyTrace
sees drifts in small models (section 3.4, figure 18), and a change of regime in tool use (section 3.3, figure 14).
"""

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

_Z = 1.959964
"""The quantile of the normal distribution for an interval of 95 %."""
_POINTS = 1000
"""The most points of a trend: it compares each with each. Of more steps, consecutive ones are averaged."""
LEAST_STEPS = 5
"""With fewer there are not enough pairs of steps for an interval of 95 %: from the least to the greatest slope of four
steps there are 92 %."""


class RegimeChange(msgspec.Struct, frozen=True, kw_only=True):
    """The most likely step at which the level has changed once, by Pettitt's test.

    Source: Pettitt 1979, "A non-parametric approach to the change-point problem". A steady drift moves the level as
    well: read it beside the drift.
    """

    step: int
    """The first step of the second regime."""
    p_value: float
    """The approximate chance of a change as clear as this one where there is none: 2 exp(-6 K² / (n³ + n²))."""
    before: float
    """The geometric mean over the steps before."""
    after: float
    """That over the other ones."""


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """How the geometric mean of an amount moves over the steps."""

    drift: float
    """Its growth from step to step, as a share: Theil and Sen's median slope of the logarithm."""
    low: float
    high: float
    """The 95 % interval of the drift: Sen 1968, "Estimates of the regression coefficient based on Kendall's tau". It
    takes steps as independent of each other."""
    change: RegimeChange

    @classmethod
    def of(cls, steps: Sequence[int], logs: Sequence[float]) -> Self | None:
        """The trend of the mean logarithm of each of [n] ascending steps; None with fewer than `LEAST_STEPS`."""
        if len(steps) < LEAST_STEPS:
            return None
        parts = min(len(steps), _POINTS)
        times, levels = (
            np.array([part.mean() for part in np.array_split(np.asarray(values, np.float64), parts)])
            for values in (steps, logs)
        )
        low, middle, high = (math.expm1(slope) for slope in slopes(times, levels))
        return cls(drift=middle, low=low, high=high, change=_change(steps, logs))

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside of the interval."""
        return self.low > 0 or self.high < 0


def slopes(times: npt.NDArray[np.float64], levels: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """The least, the median and the greatest slope of the levels at [n] times that the data allow, at 95 %."""
    first, second = np.triu_indices(len(times), 1)
    between = np.sort((levels[second] - levels[first]) / (times[second] - times[first]))
    n, pairs = len(times), len(between)
    width = _Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, round((pairs - width) / 2) - 1)
    high = min(pairs - 1, round((pairs + width) / 2))
    return float(between[low]), float(np.median(between)), float(between[high])


def _change(steps: Sequence[int], logs: Sequence[float]) -> RegimeChange:
    levels = np.asarray(logs, np.float64)
    n = len(levels)
    ranks = pl.Series(levels).rank().to_numpy()
    statistic = np.abs(2 * np.cumsum(ranks)[:-1] - np.arange(1, n) * (n + 1))
    at = int(np.argmax(statistic)) + 1
    return RegimeChange(
        step=steps[at],
        p_value=min(1.0, 2 * math.exp(-6 * float(statistic[at - 1]) ** 2 / (n**3 + n**2))),
        before=math.exp(levels[:at].mean()),
        after=math.exp(levels[at:].mean()),
    )
