"""The gamma distribution."""

from typing import ClassVar, Self

import numpy as np
from scipy import stats

from tailrace.workloads.marginals.base import Array, FitError, Positive, Tagged


class Gamma(Tagged, frozen=True, tag="gamma"):
    """See `Marginal`."""

    shape: Positive
    scale: Positive
    degrees: ClassVar[int] = 2
    """The number of free parameters."""

    def quantile(self, shares: Array) -> Array:
        """See `Marginal`."""
        return np.asarray(stats.gamma.ppf(shares, self.shape, scale=self.scale))

    def cdf(self, values: Array) -> Array:
        """See `Marginal`."""
        return np.asarray(stats.gamma.cdf(values, self.shape, scale=self.scale))

    @classmethod
    def fit(cls, values: Array) -> Self:
        """Fit [n] positive values by the maximum of their likelihood.

        Raises:
            FitError: the search does not converge.
        """
        try:
            shape, _, scale = stats.gamma.fit(values, floc=0)
        except stats.FitError as error:
            raise FitError(f"the gamma distribution does not converge: {error}") from None
        return cls(shape=float(shape), scale=float(scale))
