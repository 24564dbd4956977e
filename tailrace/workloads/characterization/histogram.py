"""Histograms on logarithmic axes: pages draw the traces of any size from their bins."""

from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.marginals.base import Array

_PER_DOUBLING = (8, 16, 32, 64, 128)
"""Bins within a doubling: the first number that gives enough of them."""
_ENOUGH = 12
_LEAST_FRACTION = 1e-4


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of values in bins of about equal width on a logarithmic axis."""

    edges: list[float]
    """[bins + 1], ascending."""
    shares: list[float]
    """[bins], together 1."""

    @classmethod
    def of(cls, values: npt.ArrayLike, *, whole: bool = True) -> Self:
        """The histogram of [n] values, one or more.

        Args:
            whole: the values are whole numbers; 0 counts as 1. Of others, those below 0.0001 count as that.
        """
        array = np.maximum(np.asarray(values, np.float64), 1 if whole else _LEAST_FRACTION)
        edges = log_edges(array, whole=whole)
        counts, _ = np.histogram(array, edges)
        return cls(edges=edges.tolist(), shares=(counts / len(array)).tolist())


class BinnedDistribution(Distribution, frozen=True, kw_only=True):
    """Figures of a distribution, with its histogram."""

    histogram: Histogram

    @classmethod
    def binned(cls, values: npt.ArrayLike, *, whole: bool = True) -> Self | None:
        """The distribution of [n] values; None without any. See `Histogram.of` for `whole`."""
        distribution = Distribution.of(values)
        if distribution is None:
            return None
        return cls(**msgspec.structs.asdict(distribution), histogram=Histogram.of(values, whole=whole))


class JointHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """The samples by the lengths of prompt and response (PolyTrace, figures 4, 10 and 13)."""

    prompt_edges: list[float]
    """[p + 1] tokens."""
    response_edges: list[float]
    """[r + 1] tokens."""
    counts: list[list[int]]
    """[r][p] samples: a row for each bin of responses."""

    @classmethod
    def of(cls, prompt_tokens: npt.ArrayLike, response_tokens: npt.ArrayLike) -> Self:
        """The joint histogram of [n] samples, one or more."""
        prompts, responses = (np.asarray(tokens, np.float64) for tokens in (prompt_tokens, response_tokens))
        edges = log_edges(responses), log_edges(prompts)
        counts, _, _ = np.histogram2d(responses, prompts, edges)
        return cls(
            prompt_edges=edges[1].tolist(),
            response_edges=edges[0].tolist(),
            counts=counts.astype(np.int64).tolist(),
        )


def log_edges(values: Array, *, whole: bool = True) -> Array:
    """The edges of bins for [n] positive values, from the first to the last bin that has some.

    Narrow distributions have narrower bins.

    Args:
        whole: the values are whole numbers, and so are the edges.
    """
    least, end = values.min(), values.max() + whole
    for fineness in _PER_DOUBLING:
        first, last = np.floor(np.log2((least, end)) * fineness)
        powers = 2 ** (np.arange(first - 1, last + 2) / fineness)
        edges = np.unique(np.round(powers)) if whole else powers
        edges = edges[np.searchsorted(edges, least, side="right") - 1 :]
        edges = edges[: np.searchsorted(edges, values.max(), side="right") + 1]
        if len(edges) > _ENOUGH:
            break
    return edges
