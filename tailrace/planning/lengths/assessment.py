"""How good expectations of lengths were, once the responses have ended.

StreamRL (section 7.2) tells the recall of the longest fifth. What can be known of a length before a response begins
depends on how alike the responses to one prompt are. So the recall that the mean of a prompt's other responses would
have stands beside it (PolyTrace, section 3.1). It is no bound: a few responses tell less than many prompts may.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.planning.lengths.base import Expectation
from tailrace.statistics.ranking import mean_of_others, recall_of_greatest

LONGEST = (20, 10, 5)
"""The percentages of longest responses whose recall is told."""


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """Expectations beside the lengths of the same responses. None where there are too few of them."""

    responses: int
    recall: dict[int, float | None]
    """Of the longest so many percent, the share that is among as many with the longest expectations."""
    ceiling: dict[int, float | None]
    """The same with the mean of each prompt's other responses as the expectation."""
    tau: float | None
    """Kendall's rank correlation of expectations and lengths: 1 where all are in order, 0 by chance."""
    inside: float
    """The share of responses within their intervals; it should be `INTERVAL`."""

    @property
    def of_ceiling(self) -> float | None:
        """The recall of the longest fifth as a part of its ceiling."""
        recall, ceiling = self.recall[LONGEST[0]], self.ceiling[LONGEST[0]]
        return None if recall is None or not ceiling else recall / ceiling


def assess(expected: Sequence[Expectation], lengths: npt.ArrayLike, groups: npt.ArrayLike) -> Assessment:
    """Compare expectations with what came.

    Args:
        expected: [n], one or more, in the order of the responses.
        lengths: [n] tokens of the responses.
        groups: [n] the number of each response's group.
    """
    from scipy.stats import kendalltau  # takes a second

    tokens = np.asarray(lengths, np.float64)
    median, low, high = (np.array(column) for column in zip(*expected, strict=True))
    others = mean_of_others(tokens, groups)
    known = np.isfinite(others)
    tau = float(kendalltau(median, tokens).statistic) if len(tokens) > 1 else float("nan")
    return Assessment(
        responses=len(tokens),
        recall={percent: recall_of_greatest(tokens, median, percent) for percent in LONGEST},
        ceiling={percent: recall_of_greatest(tokens[known], others[known], percent) for percent in LONGEST},
        tau=tau if np.isfinite(tau) else None,  # equal expectations, or equal lengths, have no order
        inside=float(np.mean((low <= tokens) & (tokens <= high))),
    )
