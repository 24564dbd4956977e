"""The distribution of one amount, such as the tokens of responses."""

from typing import Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a distribution."""

    count: int
    mean: float
    deviation: float
    """Standard deviation."""
    least: float
    percentiles: dict[int, float]
    """By `PERCENTILES`, interpolated linearly."""
    most: float

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Self | None:
        """The distribution of [n] values; None without any."""
        array = np.asarray(values, np.float64)
        if not array.size:
            return None
        return cls(
            count=array.size,
            mean=float(array.mean()),
            deviation=float(array.std()),
            least=float(array.min()),
            percentiles={
                p: float(value) for p, value in zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)
            },
            most=float(array.max()),
        )

    @property
    def variation(self) -> float:
        """The coefficient of variation: standard deviation over mean."""
        return self.deviation / self.mean if self.mean else 0.0

    @property
    def tail(self) -> float:
        """The greatest value over the 90th percentile (PolyTrace, section 3)."""
        return self.most / self.percentiles[90] if self.percentiles[90] else 0.0


D = TypeVar("D", bound=Distribution)


def known(distribution: D | None) -> D:
    """The distribution of values of which there are some: a trace has samples."""
    assert distribution is not None
    return distribution


def mean(values: pl.Series) -> float | None:
    """The mean of the values that are known, or the share of true ones; None without any."""
    known_values = values.drop_nulls()
    return float(known_values.to_numpy().mean()) if len(known_values) else None
