"""Which distribution describes an amount best.

The Bayesian information criterion chooses (Schwarz 1978): the likelihood, less a price for each parameter. It needs no
held-out samples, so that small traces are fitted whole. A likelihood is decided by the many samples in the middle, but
a step of RL by its few longest ones. So the formula must also come near the quantiles; otherwise these are taken.
"""

from collections.abc import Iterator

import numpy as np

from tailrace.errors import TraceError, did_you_mean
from tailrace.workloads.marginals.base import Array, FitError, Marginal
from tailrace.workloads.marginals.factory import FAMILIES, AnyMarginal, Formula, with_tails
from tailrace.workloads.marginals.quantiles import Quantiles

CHOICES = ("auto", *FAMILIES, "quantiles")
"""The names that `--family` takes."""
_POINTS = 2500
"""Quantiles of an amount that stand for all its samples in a fit; a million samples would take minutes."""
_ENOUGH = 100
"""Fewer values have no tail to fit."""
_WORST = 0.05
"""The relative error of p50, p90 and p99, and the Kolmogorov-Smirnov statistic, from which on no formula is taken."""
_KOLMOGOROV = 1.36
"""That statistic, times the root of the number of values, that chance exceeds in one case of 20."""


def check_family(family: str) -> None:
    """Check the name of a family.

    Raises:
        TraceError: it is none of `CHOICES`.
    """
    if family not in CHOICES:
        raise TraceError(f"family {family!r} is none of {', '.join(CHOICES)}{did_you_mean(family, CHOICES)}")


def choose(values: Array, family: str = "auto", worth: float | None = None) -> AnyMarginal:
    """Return the distribution of [n] values that describes them best, of one family or of all.

    Quantiles are taken for fewer than 100 values, and for values that are not positive or all equal. Unless a family is
    named, they are also taken where the best formula misses p50, p90 or p99 by more than 5 %, or has a
    Kolmogorov-Smirnov statistic above 0.05, and chance does not explain it.

    Args:
        worth: the number of independent values that tell as much; by default n.

    Raises:
        FitError: the named family does not converge.
    """
    if family == "quantiles" or len(values) < _ENOUGH or values.min() <= 0 or values.min() == values.max():
        return Quantiles.fit(values)
    points, worth = _points(values), len(values) if worth is None else worth
    names = FAMILIES if family == "auto" else [family]
    candidates = [candidate for name in names for candidate in _candidates(points, name, is_auto=family == "auto")]
    best = min(candidates, key=lambda candidate: _criterion(candidate, points, worth))
    return Quantiles.fit(values) if family == "auto" and _misses(best, points, worth) else best


def _candidates(points: Array, name: str, *, is_auto: bool) -> Iterator[Formula]:
    """Yield the fits of a family, with tails and without; none where `is_auto` and it does not converge."""
    try:
        for body in FAMILIES[name](points):
            yield from with_tails(points, body)
    except FitError:
        if not is_auto:
            raise


def _points(values: Array) -> Array:
    """Return the values, or their quantiles at even distances where they are many."""
    if len(values) <= _POINTS:
        return values
    return np.quantile(values, (np.arange(_POINTS) + 0.5) / _POINTS, method="nearest")


def _criterion(marginal: Formula, points: Array, count: float) -> float:
    """Return the criterion for `count` independent values that `points` stand for; the least is best."""
    known, times = np.unique(points, return_counts=True)
    half = _half_width(known)
    likely = np.maximum(marginal.cdf(known + half) - marginal.cdf(known - half), 1e-300)
    likelihood = float(times @ np.log(likely)) * count / len(points)
    return marginal.degrees * float(np.log(count)) - 2 * likelihood


def _misses(marginal: Marginal, points: Array, count: float) -> bool:
    """Whether a distribution is further from `points` than 5 % and the chance of `count` independent values explain."""
    shares = np.array([0.5, 0.9, 0.99])
    width = 2 * np.sqrt(shares * (1 - shares) / count)  # of 95 % of the shares that lie below the true quantile
    low, high = (np.quantile(points, np.clip(shares + part, 0, 1)) for part in (-width, width))
    true, found = np.quantile(points, shares), marginal.quantile(shares)
    if ((found < np.minimum(low, (1 - _WORST) * true)) | (found > np.maximum(high, (1 + _WORST) * true))).any():
        return True
    known, times = np.unique(points, return_counts=True)
    distance = np.abs(np.cumsum(times) / len(points) - marginal.cdf(known + _half_width(known)))
    return bool(distance.max() > max(_WORST, _KOLMOGOROV / np.sqrt(count)))


def _half_width(values: Array) -> Array:
    """Return how far what rounds to each value may be from it. Tokens are whole numbers; seconds are hardly rounded."""
    return np.full(len(values), 0.5) if (values == np.rint(values)).all() else 5e-4 * values
