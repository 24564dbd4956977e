"""Whole numbers from 1 on, each with its share: for numbers of turns."""

from typing import Annotated, Self

import msgspec
import numpy as np

from tailrace.workloads.marginals.base import Array, Share, Tagged


class Shares(Tagged, frozen=True, tag="shares"):
    """See `Marginal`."""

    shares: Annotated[list[Share], msgspec.Meta(min_length=1)]
    """Of 1, 2, … They add up to 1."""

    def __post_init__(self) -> None:
        """Check the shares, so that a file with wrong ones is refused."""
        if abs(sum(self.shares) - 1) > 1e-3:
            raise ValueError(f"`shares` add up to {sum(self.shares):g}; expected 1")

    @property
    def most(self) -> int:
        """The greatest number."""
        return len(self.shares)

    def quantile(self, shares: Array) -> Array:
        """See `Marginal`."""
        return np.minimum(np.searchsorted(np.cumsum(self.shares), shares) + 1, self.most).astype(np.float64)

    def cdf(self, values: Array) -> Array:
        """See `Marginal`."""
        sums = np.concatenate([[0.0], np.cumsum(self.shares)])
        return np.asarray(sums[np.clip(np.floor(values).astype(int), 0, self.most)])

    @classmethod
    def fit(cls, values: Array) -> Self:
        """Count [n] whole numbers from 1 on."""
        counts = np.bincount(values.astype(int))[1:]
        return cls(shares=(counts / counts.sum()).tolist())
