"""How the lengths of responses change over steps: a trend, a change of regime, or nothing that chance would not do.

A step is one observation, the mean of its log-lengths: the samples of a step are not independent, since they have the
same weights and few prompts. The tests are those of a description (`characterization.trend`).
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from tailrace.workloads.characterization.trend import TrendFigures
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.parameters import Regime, Trend

_CHANCE = 0.01
"""The probability of as clear a change by chance, below which a change is believed."""


def fit_drift(samples: pl.DataFrame) -> Trend | Regime | None:
    """Return the drift of the samples of a trace. Where a trend and a regime are both significant, the one that fits
    better is returned.

    The tests are of ranks, which few steps have few of: a trend needs six steps, a regime 16.
    """
    levels = samples.group_by("step").agg(pl.col("response_tokens").log().mean()).sort("step")
    steps, logs = levels["step"].to_list(), levels["response_tokens"].to_numpy()
    found = TrendFigures.of(steps, logs.tolist())
    if found is None:
        return None
    offsets = np.array(steps) - steps[0]
    drifts: list[Trend | Regime] = []
    if found.p_value < _CHANCE:
        drifts.append(Trend(per_step=float(np.log1p(found.drift)), steps=int(offsets[-1]) + 1))
    if found.change.p_value < _CHANCE:
        drifts.append(_regime(logs, offsets))
    return min(drifts, key=lambda drift: _left(logs, offsets, drift), default=None)


def _regime(logs: Array, offsets: npt.NDArray[np.int64]) -> Regime:
    """Return the change of regime that leaves the least squares. That of Pettitt's test lies nearer to the middle."""
    counts = np.arange(1, len(logs))
    weights = np.sqrt(counts * (len(logs) - counts))
    place = 1 + int(np.argmax(np.abs(np.cumsum(logs - logs.mean())[:-1]) / weights))
    return Regime(step=int(offsets[place]), change=float(np.exp(logs[place:].mean() - logs[:place].mean())))


def _left(logs: Array, offsets: npt.NDArray[np.int64], drift: Trend | Regime) -> float:
    """Return the variance of [n] levels that a drift leaves."""
    return float(np.var(logs - np.log([drift.factor(int(offset)) for offset in offsets])))
