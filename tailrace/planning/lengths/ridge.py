"""Log-lengths as a linear function of figures of a prompt: ridge regression from sums alone.

No response is kept. Sums of products of figures and log-lengths are all that a solution needs, so responses of older
weights can count less (recursive least squares with forgetting). The prompts are in two halves by their name, with sums
of their own. Each penalty is tried: what one half gives is compared with the lengths of the other. The best one is
used, and its errors on the other half are the deviation. Responses to one prompt are in one half, so they never tell of
one another there.

Figures are penalized by their variance, so their units do not matter (Hastie, Tibshirani and Friedman 2009, "The
Elements of Statistical Learning", sections 3.4.1 and 7.10). Those of a table, such as the counts of words, have the
same unit, and are penalized by the mean of their variances. So a word of few prompts moves an expectation less than one
of many.
"""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.planning.lengths.figures import half_of
from tailrace.types import WeightVersion

PENALTIES = tuple(10.0 ** (power / 2) for power in range(-6, 5))
"""Tried, as parts of a figure's sum of squares."""
_FLAT = 1e-9
"""A figure is the same for all where its variance is a smaller part of its mean square."""

Array = npt.NDArray[np.float64]


class Solution(NamedTuple):
    """A linear function of figures."""

    coefficients: Array
    """[figures]"""
    deviation: float
    """Of log-lengths from what it gives, for prompts that it does not know."""
    mean: float
    """Of all log-lengths."""
    spread: float
    """Their deviation from the mean."""


class RidgeState(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Ridge` has learned."""

    figures: int
    sums: bytes
    """[2, figures + 1, figures + 1] float64, of each half."""
    version: WeightVersion


class Ridge:
    """See the module. The first figure is 1. `solve` may run in a thread beside the other calls."""

    def __init__(self, figures: int, *, tables: Sequence[range] = (), discount: float = 1.0) -> None:
        """Make one that knows nothing.

        Args:
            figures: of a prompt.
            tables: figures that have the same unit, table by table.
            discount: the weight that a response keeps with each newer version.
        """
        self._tables = tables
        self._discount = discount
        self._sums = np.zeros((2, figures + 1, figures + 1))
        """Weighted sums of products of the figures and the log-length, of each half."""
        self._version: WeightVersion = 0
        self._lock = threading.Lock()

    def learn(self, prompt_ids: list[str], figures: Array, logs: Array, version: WeightVersion) -> None:
        """Take in responses that this version has begun.

        Args:
            prompt_ids: [n] of the prompt of each.
            figures: [n, figures] of the prompt.
            logs: [n] logarithms of the tokens.
            version: the oldest weights that made a token of them.
        """
        halves = np.array([half_of(prompt_id) for prompt_id in prompt_ids])
        rows = np.column_stack([figures, logs])
        with self._lock:
            if version > self._version:
                self._sums *= self._discount ** (version - self._version)
                self._version = version
            weight = self._discount ** (self._version - version)
            for half in (0, 1):
                of_half = rows[halves == half]
                self._sums[half] += weight * of_half.T @ of_half

    def solve(self) -> Solution | None:
        """Return the function that fits what was learned; None before anything was."""
        with self._lock:
            halves = self._sums.copy()
        total = halves[0] + halves[1]
        if total[0, 0] <= 0:
            return None
        squares = np.diag(total)[:-1] / total[0, 0]
        variances = squares - (total[0, :-1] / total[0, 0]) ** 2
        moves = variances > _FLAT * squares
        for table in map(list, self._tables):
            variances[table] = variances[table].mean(where=moves[table]) if moves[table].any() else 0.0
        variances[0], moves[0] = 0.0, True  # the mean is free
        columns = np.append(np.flatnonzero(moves), len(variances))
        small = halves[:, columns][:, :, columns]
        found = _Halves(small, variances[moves])
        penalty, error = found.best()
        coefficients = np.zeros(len(variances))
        coefficients[moves] = found.fitted(small[0] + small[1], penalty)
        mean = float(total[0, -1] / total[0, 0])
        spread = math.sqrt(max(0.0, float(total[-1, -1] / total[0, 0]) - mean**2))
        return Solution(coefficients, math.sqrt(max(0.0, error)), mean, spread)

    def state(self) -> RidgeState:
        """Return what it has learned."""
        with self._lock:
            return RidgeState(figures=self._sums.shape[1] - 1, sums=self._sums.tobytes(), version=self._version)

    def restore(self, state: RidgeState) -> None:
        """Go on from what another has learned.

        Raises:
            ValueError: that one has another number of figures.
        """
        if state.figures != self._sums.shape[1] - 1 or len(state.sums) != self._sums.nbytes:
            raise ValueError(f"it has learned of {state.figures} figures a prompt; here are {self._sums.shape[1] - 1}")
        with self._lock:
            self._sums = np.frombuffer(state.sums, np.float64).reshape(self._sums.shape).copy()
            self._version = state.version


class _Halves:
    """Solutions of each half, and their errors on the other."""

    def __init__(self, sums: Array, variances: Array) -> None:
        """`sums`: as in `Ridge`, of the figures that vary and the first; `variances`: by which these are penalized."""
        self._sums = sums
        self._variances = variances

    def best(self) -> tuple[float, float]:
        """The penalty with the least mean squared error on the other half, and this error."""
        if min(self._sums[0][0, 0], self._sums[1][0, 0]) <= 0:  # all of one prompt, or of few
            total = self._sums[0] + self._sums[1]
            mean = total[0, -1] / total[0, 0]
            return PENALTIES[-1], float(total[-1, -1] / total[0, 0] - mean**2)
        return min(((penalty, self._error(penalty)) for penalty in PENALTIES), key=lambda found: found[1])

    def fitted(self, sums: Array, penalty: float) -> Array:
        """The coefficients for these sums."""
        ridge = np.diag(penalty * sums[0, 0] * self._variances)
        return np.asarray(np.linalg.solve(sums[:-1, :-1] + ridge, sums[:-1, -1]), np.float64)

    def _error(self, penalty: float) -> float:
        squares = 0.0
        for taught, other in (self._sums, self._sums[::-1]):
            residual = np.append(-self.fitted(taught, penalty), 1.0)
            squares += float(residual @ other @ residual)
        return squares / float(self._sums[0][0, 0] + self._sums[1][0, 0])
