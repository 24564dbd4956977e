"""A distribution whose largest values follow Pareto's law: the share above x falls as a power of x."""

from typing import Annotated, Self

import msgspec
import numpy as np

from tailrace.workloads.marginals.base import Array, FitError, Positive, Tagged
from tailrace.workloads.marginals.gamma import Gamma
from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.mixture import Mixture

Body = Lognormal | Gamma | Mixture


class ParetoTail(Tagged, frozen=True, tag="pareto_tail"):
    """See `Marginal`. Below the threshold it is `body`, without what that has above."""

    body: Body
    threshold: Positive
    share: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)]
    """Of the values above the threshold."""
    exponent: Annotated[float, msgspec.Meta(ge=0.1, le=1e12)]
    """The share above x falls as x to the power of minus this."""

    def __post_init__(self) -> None:
        """Check the threshold, so that a file with a wrong one is refused."""
        if self._body_share <= 0:
            raise ValueError(f"`body` has nothing below the threshold of {self.threshold:g}")

    @property
    def degrees(self) -> int:
        """The number of free parameters."""
        return self.body.degrees + 3

    def quantile(self, shares: Array) -> Array:
        """See `Marginal`."""
        below = self.body.quantile(np.minimum(shares / (1 - self.share), 1) * self._body_share)
        rest = np.minimum((1 - shares) / self.share, 1)
        return np.where(shares < 1 - self.share, below, self.threshold * rest ** (-1 / self.exponent))

    def cdf(self, values: Array) -> Array:
        """See `Marginal`."""
        below = (1 - self.share) * self.body.cdf(np.minimum(values, self.threshold)) / self._body_share
        rest = (np.maximum(values, self.threshold) / self.threshold) ** -self.exponent
        return np.where(values < self.threshold, below, 1 - self.share * rest)

    @property
    def _body_share(self) -> float:
        """The share of `body` below the threshold."""
        return float(self.body.cdf(np.array([self.threshold]))[0])

    @classmethod
    def fit(cls, values: Array, body: Body, share: float) -> Self:
        """Put a tail onto `body`, which is fitted to the same [n] values; its share of them is `share`.

        The exponent is that of Hill (1975, "A simple general approach to inference about the tail of a distribution").

        Raises:
            FitError: no value is above the threshold, or the tail is so heavy that it has no mean.
        """
        threshold = float(np.quantile(values, 1 - share))
        above = values[values > threshold]
        if not above.size:
            raise FitError(f"no value is above {threshold:g}, where a tail would begin")
        exponent = 1 / float(np.log(above / threshold).mean())
        if exponent <= 1:
            raise FitError(f"the tail above {threshold:g} has an exponent of {exponent:.2g}, with which it has no mean")
        return cls(body=body, threshold=threshold, share=len(above) / len(values), exponent=exponent)
