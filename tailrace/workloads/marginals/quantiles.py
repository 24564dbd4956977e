"""Quantiles with lines between them: for amounts that no formula describes, such as a few sizes of videos."""

from typing import Annotated, Self

import msgspec
import numpy as np

from tailrace.workloads.marginals.base import Array, Share, Tagged

_FITTED = np.array([*np.linspace(0, 0.98, 50), 0.99, 0.995, 0.999, 1.0])


class Quantiles(Tagged, frozen=True, tag="quantiles"):
    """See `Marginal`."""

    shares: Annotated[list[Share], msgspec.Meta(min_length=2)]
    """Ascending, from 0 to 1."""
    values: list[Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]]
    """The quantile of each share, ascending."""

    def __post_init__(self) -> None:
        """Check the lists, so that a file with a wrong one is refused."""
        if len(self.shares) != len(self.values):
            raise ValueError(f"there are {len(self.values)} `values` for {len(self.shares)} `shares`")
        if (self.shares[0], self.shares[-1]) != (0, 1) or (np.diff(self.shares) <= 0).any():
            raise ValueError("`shares` do not ascend from 0 to 1")
        if (np.diff(self.values) < 0).any():
            raise ValueError("`values` do not ascend")

    def quantile(self, shares: Array) -> Array:
        """See `Marginal`."""
        return np.interp(shares, self.shares, self.values)

    def cdf(self, values: Array) -> Array:
        """See `Marginal`."""
        places = np.searchsorted(self.values, values, side="right")
        known, shares = np.array(self.values), np.array(self.shares)
        left, right = np.clip(places - 1, 0, None), np.clip(places, None, len(known) - 1)
        widths = known[right] - known[left]
        part = np.divide(values - known[left], widths, out=np.zeros(len(values)), where=widths > 0)
        inside = shares[left] + part * (shares[right] - shares[left])
        return np.where(places == 0, 0.0, inside)

    @classmethod
    def fit(cls, values: Array) -> Self:
        """Take the quantiles of [n] values, more of them near the largest."""
        return cls(shares=_FITTED.tolist(), values=np.quantile(values, _FITTED).tolist())
