"""A mixture of lognormal distributions.

The fit is expectation-maximization (Dempster, Laird and Rubin 1977). In one dimension it is short enough to do without
scikit-learn.
"""

from typing import Annotated, Self

import msgspec
import numpy as np
from scipy.special import ndtr

from tailrace.workloads.marginals.base import Array, FitError, Log, LogDeviation, Share, Tagged

_GRID = 4001
"""Points between which the inverse of the distribution is a line, over all components' widths."""
_WIDTHS = 9.0
"""Standard deviations on either side of a component that the grid covers."""
_NARROWEST = 0.005
"""The least deviation of log-lengths that a component may have, so that none shrinks onto one value."""
_ROUNDS = 2000
_SETTLED = 5e-6
"""The gain in log-likelihood of a sample below which the fit is done."""


class Mixture(Tagged, frozen=True, tag="mixture"):
    """See `Marginal`. The three lists are as long, an entry for each component."""

    weights: Annotated[list[Share], msgspec.Meta(min_length=1)]
    """They add up to 1."""
    log_means: list[Log]
    log_deviations: list[LogDeviation]

    def __post_init__(self) -> None:
        """Check the lists, so that a file with a wrong one is refused."""
        if not len(self.weights) == len(self.log_means) == len(self.log_deviations):
            raise ValueError("`weights`, `log_means` and `log_deviations` are of different lengths")
        if abs(sum(self.weights) - 1) > 1e-3:
            raise ValueError(f"`weights` add up to {sum(self.weights):g}; expected 1")

    @property
    def degrees(self) -> int:
        """The number of free parameters."""
        return 3 * len(self.weights) - 1

    def quantile(self, shares: Array) -> Array:
        """See `Marginal`."""
        means, deviations = np.array(self.log_means), np.array(self.log_deviations)
        steps = np.linspace(-_WIDTHS, _WIDTHS, _GRID)
        logs = np.unique(means[:, None] + deviations[:, None] * steps)
        return np.exp(np.interp(shares, self._of_logs(logs), logs))

    def cdf(self, values: Array) -> Array:
        """See `Marginal`."""
        return self._of_logs(np.log(np.maximum(values, 1e-300)))

    def _of_logs(self, logs: Array) -> Array:
        scaled = (logs[:, None] - np.array(self.log_means)) / np.array(self.log_deviations)
        weights = np.array(self.weights)
        return np.asarray(ndtr(scaled) @ (weights / weights.sum()))

    @classmethod
    def fit(cls, values: Array, components: int) -> Self:
        """Fit [n] positive values by the maximum of their likelihood, which is searched from their quantiles.

        Raises:
            FitError: the search does not converge.
        """
        logs = np.log(values)
        weights = np.full(components, 1 / components)
        means = np.quantile(logs, (np.arange(components) + 0.5) / components)
        deviations = np.full(components, max(_NARROWEST, float(logs.std()) / components))
        reached = -np.inf
        for _ in range(_ROUNDS):
            joint = np.log(weights / deviations)[:, None] - ((logs - means[:, None]) / deviations[:, None]) ** 2 / 2
            peaks = joint.max(axis=0)
            owners = np.exp(joint - peaks)
            whole = owners.sum(axis=0)
            owners /= whole
            sizes = owners.sum(axis=1) + 1e-9
            weights, means = sizes / sizes.sum(), owners @ logs / sizes
            variances = (owners * (logs - means[:, None]) ** 2).sum(axis=1) / sizes
            deviations = np.maximum(_NARROWEST, np.sqrt(variances))
            before, reached = reached, float((np.log(whole) + peaks).mean())
            if reached - before < _SETTLED:
                return cls(weights=weights.tolist(), log_means=means.tolist(), log_deviations=deviations.tolist())
        raise FitError(f"the mixture of {components} components does not converge in {_ROUNDS} rounds")
