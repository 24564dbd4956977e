"""How two amounts go together."""

from typing import Self

import msgspec
import numpy as np
import polars as pl


class Correlation(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients from -1 to 1; 0 where the amounts have nothing to do with each other."""

    pearson: float
    spearman: float
    """Of the ranks; equal values share the mean of theirs."""

    @classmethod
    def of(cls, one: pl.Series, other: pl.Series) -> Self | None:
        """The correlation of two columns of [n] positive values; None where one of them never varies."""
        pair = [column.cast(pl.Float64) for column in (one, other)]
        if any(column.n_unique() < 2 for column in pair):
            return None
        return cls(
            pearson=_pearson(*pair),
            spearman=_pearson(*(column.rank() for column in pair)),
        )


def _pearson(one: pl.Series, other: pl.Series) -> float:
    return float(np.corrcoef(one.to_numpy(), other.to_numpy())[0, 1])
