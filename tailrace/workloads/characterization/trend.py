"""How an amount moves over the steps: a steady drift, and a change from one regime to another.

Both tests look at ranks only, so neither a few long responses nor the shape of the distribution sways them. Consecutive
steps have similar weights, so their levels may be correlated, and count as fewer then (`_variance_ratio`). PolyTrace
sees drifts in small models (section 3.4, figure 18), and a change of regime in tool use (section 3.3, figure 14).
"""

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import polars as pl

from tailrace.workloads.marginals.base import Array

_Z = 1.959964
"""The quantile of the normal distribution for an interval of 95 %."""
_POINTS = 1000
"""The most points of a trend: it compares each with each. Of more steps, consecutive ones are averaged."""
_MOST_CORRELATED = 0.95
"""The greatest correlation of consecutive steps that is assumed: it keeps the ratio of variances finite."""
_CHANCE = 0.05
"""A drift or a change is clear where chance gives as clear a one less often than this."""
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
    """The approximate chance of a change as clear as this one where there is none: 2 exp(-6 K² / (n³ + n²)). For
    correlated steps K² is divided by `_variance_ratio`."""
    before: float
    """The geometric mean over the steps before."""
    after: float
    """That over the other ones."""

    @property
    def is_clear(self) -> bool:
        """Whether chance gives as clear a change in fewer than one of 20 cases."""
        return self.p_value < _CHANCE


class TrendFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How the geometric mean of an amount moves over the steps."""

    drift: float
    """Its growth from step to step, as a share: Theil and Sen's median slope of the logarithm."""
    low: float
    high: float
    """The 95 % interval of the drift: Sen 1968, "Estimates of the regression coefficient based on Kendall's tau". It is
    wider for correlated steps, and ends at the least and the greatest slope of two steps."""
    p_value: float
    """The approximate chance of a drift as clear as this one where there is none: Mann and Kendall's test.

    For correlated steps its variance is multiplied by `_variance_ratio`, as Yue and Wang 2004 do in "The Mann-Kendall
    test modified by effective sample size".
    """
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
        drift, low, high, p_value = _drift(times, levels)
        return cls(drift=drift, low=low, high=high, p_value=p_value, change=_change(steps, logs))

    @property
    def is_clear(self) -> bool:
        """Whether chance gives as clear a drift in fewer than one of 20 cases."""
        return self.p_value < _CHANCE


def _drift(times: Array, levels: Array) -> tuple[float, float, float, float]:
    """The drift at [n] times, the ends of its interval, and its p-value; see `TrendFigures`."""
    first, second = np.triu_indices(len(times), 1)
    slopes = np.sort((levels[second] - levels[first]) / (times[second] - times[first]))
    n, pairs, middle = len(times), len(slopes), float(np.median(slopes))
    deviation = math.sqrt(_variance_ratio(levels - middle * times) * n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, round((pairs - _Z * deviation) / 2) - 1)
    high = min(pairs - 1, round((pairs + _Z * deviation) / 2))
    score = max(0.0, abs(float(np.sign(slopes).sum())) - 1) / deviation
    drift, least, greatest = (math.expm1(slope) for slope in (middle, slopes[low], slopes[high]))
    return drift, least, greatest, math.erfc(score / math.sqrt(2))


def _variance_ratio(left: Array) -> float:
    """How many times the variance of their mean is that of independent values: (1 + ρ) / (1 - ρ).

    ρ is the correlation of each of [n] values with the next one, from 0 on. The usual estimate is too low by
    (1 + 4ρ) / n, which is added (Marriott and Pope 1954, "Bias in the estimation of autocorrelations").
    """
    deviations = left - left.mean()
    squares = float(deviations @ deviations)
    if squares < 1e-20:  # rounding alone
        return 1.0
    estimate = float(deviations[1:] @ deviations[:-1]) / squares
    correlation = min(_MOST_CORRELATED, max(0.0, estimate + (1 + 4 * estimate) / len(left)))
    return (1 + correlation) / (1 - correlation)


def _change(steps: Sequence[int], logs: Sequence[float]) -> RegimeChange:
    levels = np.asarray(logs, np.float64)
    n = len(levels)
    ranks = pl.Series(levels).rank().to_numpy()
    statistic = np.abs(2 * np.cumsum(ranks)[:-1] - np.arange(1, n) * (n + 1))
    at = int(np.argmax(statistic)) + 1
    before, after = levels[:at], levels[at:]
    ratio = _variance_ratio(np.concatenate([before - before.mean(), after - after.mean()]))
    return RegimeChange(
        step=steps[at],
        p_value=min(1.0, 2 * math.exp(-6 * float(statistic[at - 1]) ** 2 / (ratio * (n**3 + n**2)))),
        before=math.exp(before.mean()),
        after=math.exp(after.mean()),
    )
