"""How the lengths of responses change over steps: a trend, a change of regime, or nothing that chance would not do.

A step is one observation, the mean of its log-lengths: the samples of a step are not independent, since they have the
same weights and few prompts.
"""

import numpy as np
import polars as pl
from scipy import stats

from tailrace.workloads.marginals.base import Array
from tailrace.workloads.parameters import Regime, Trend

_CHANCE = 0.01
"""The probability of as clear a change by chance, below which a change is believed."""
_LEAST_STEPS = 6
_SIDE = 3
"""The least steps before and after a change of regime."""


def fit_drift(samples: pl.DataFrame) -> Trend | Regime | None:
    """Return the drift of the samples of a trace. Where a trend and a regime are both significant, the one that fits
    better is returned.

    A trend is tested by the slope of a regression. A regime is tested by Welch's test at the most likely step, with the
    probability times the number of steps that were tried (Bonferroni). Fewer than six steps show neither.
    """
    levels = samples.group_by("step").agg(pl.col("response_tokens").log().mean()).sort("step")
    steps = (levels["step"] - levels["step"].min()).to_numpy().astype(np.float64)
    means = levels["response_tokens"].to_numpy()
    if len(steps) < _LEAST_STEPS or np.ptp(means) == 0:
        return None
    found = [each for each in (_trend(steps, means), _regime(steps, means)) if each is not None]
    return min(found, default=(0.0, None), key=lambda each: each[0])[1]


def _trend(steps: Array, means: Array) -> tuple[float, Trend] | None:
    """Return a significant trend, with the squares that it leaves."""
    line = stats.linregress(steps, means)
    if line.pvalue >= _CHANCE:
        return None
    left = means - line.intercept - line.slope * steps
    return float(left @ left), Trend(per_step=float(line.slope), steps=int(steps[-1]) + 1)


def _regime(steps: Array, means: Array) -> tuple[float, Regime] | None:
    """Return a significant change of regime, with the squares that it leaves."""
    places = range(_SIDE, len(steps) - _SIDE + 1)
    squares = {
        place: len(means[:place]) * means[:place].var() + len(means[place:]) * means[place:].var() for place in places
    }
    place = min(squares, key=lambda each: squares[each])
    before, after = means[:place], means[place:]
    if np.ptp(before) + np.ptp(after) > 0:
        chance = float(stats.ttest_ind(before, after, equal_var=False).pvalue) * len(places)
        if chance >= _CHANCE:
            return None
    change = float(np.exp(after.mean() - before.mean()))
    return float(squares[place]), Regime(step=int(steps[place]), change=change)
