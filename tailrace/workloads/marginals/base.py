"""What a distribution of one amount is."""

from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e12)]
MOST_LOG = 50.0
Log = Annotated[float, msgspec.Meta(ge=-MOST_LOG, le=MOST_LOG)]
"""The logarithm of an amount or of a factor, small enough for what is computed with it to stay finite."""
LogDeviation = Annotated[float, msgspec.Meta(gt=0.0, le=MOST_LOG)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class FitError(ValueError):
    """Raised where a distribution cannot be fitted. The message says why and names no file."""


class Marginal(Protocol):
    """The distribution of one amount. It is also a tagged struct, so that a file can hold it."""

    def quantile(self, shares: Array) -> Array:
        """Return the values below which these shares of the distribution lie.

        Args:
            shares: [n] between 0 and 1.
        """

    def cdf(self, values: Array) -> Array:
        """Return the share of the distribution at or below each of [n] values."""


class Tagged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A struct that a file names by its `type`."""
