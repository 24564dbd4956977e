"""The lognormal distribution: the logarithm of the amount is normal."""

from typing import ClassVar, Self

import numpy as np
from scipy.special import ndtr, ndtri

from tailrace.workloads.marginals.base import Array, Log, LogDeviation, Tagged


class Lognormal(Tagged, frozen=True, tag="lognormal"):
    """See `Marginal`."""

    log_mean: Log
    log_deviation: LogDeviation
    degrees: ClassVar[int] = 2
    """The number of free parameters."""

    def quantile(self, shares: Array) -> Array:
        """See `Marginal`."""
        return np.exp(self.log_mean + self.log_deviation * np.asarray(ndtri(shares)))

    def cdf(self, values: Array) -> Array:
        """See `Marginal`."""
        logs = np.log(np.maximum(values, 1e-300))
        return np.asarray(ndtr((logs - self.log_mean) / self.log_deviation))

    @classmethod
    def fit(cls, values: Array) -> Self:
        """Fit [n] positive values by the maximum of their likelihood."""
        logs = np.log(values)
        return cls(log_mean=float(logs.mean()), log_deviation=float(logs.std()))

    @classmethod
    def of_moments(cls, mean: float, deviation: float) -> Self:
        """Return the distribution with this mean and this standard deviation of the amount itself."""
        variance = float(np.log1p((deviation / mean) ** 2))
        return cls(log_mean=float(np.log(mean)) - variance / 2, log_deviation=float(np.sqrt(variance)))
