"""Paths of several switches, by dynamic programming: backwards from the end, over moments and degrees."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tailrace.planning.curves import Floats

ROUNDING_S = 1e-9
"""Seconds by which sums of seconds may differ for no reason."""


class Path(NamedTuple):
    """The way on from one of the degrees."""

    seconds: float
    """Seconds of steps and switches, without what it costs to end with the last degree."""
    later: tuple[tuple[int, int], ...]
    """Its switches: the new degree, and the number of unfinished sequences at that time."""


class Paths:
    """The cheapest ways to go on from each moment."""

    def __init__(
        self,
        degrees: Sequence[int],
        at: Sequence[int],
        run_s: Floats,
        switch_s: Floats,
        end_s: Floats,
        *,
        margin_s: float,
    ) -> None:
        """Find them: those with the least sum of seconds, and of `margin_s` for each switch.

        Of equal ones, that which stays longer is taken. All seconds depend on the moment and the degree alone. So the
        way on after a first switch is that which is best without `stretch`; see `path`.

        Args:
            degrees: [D].
            at: [S] numbers of unfinished sequences, one for each moment.
            run_s: [S, D] seconds from each moment to the next, or to the end.
            switch_s: [S, D, D] seconds of a switch at each moment, from the degree of the row to that of the column.
                None is made at the first moment.
            end_s: [D] what it costs to end with each degree, with the margins of switches that follow.
        """
        self._degrees, self._at, self._end_s = degrees, at, end_s
        self._run_s, self._switch_s, self._margin_s = run_s, switch_s, margin_s
        every = np.arange(len(degrees))
        costs_s = switch_s + margin_s + ROUNDING_S * np.arange(len(at), 0, -1)[:, None, None]  # later ones cost less
        costs_s[:, every, every] = 0.0
        self._rest_s = np.empty((len(run_s), 2, len(degrees)))
        """From each moment on: of steps, and of switches, margins and the end."""
        self._next = np.empty(run_s.shape, np.int64)
        left_s = np.stack([np.zeros(len(degrees)), end_s])
        for moment in range(len(run_s) - 1, -1, -1):
            self._rest_s[moment] = left_s
            rest_s = self._rest_s[moment]
            rest_s[0] += run_s[moment]
            following = self._next[moment] = (costs_s[moment] + rest_s[0] + rest_s[1]).argmin(1)
            left_s = rest_s[:, following]
            left_s[1] += costs_s[moment, every, following]

    def path(self, first: int, seconds: Floats, stretch: Floats) -> Path:
        """The path that begins with this degree.

        Args:
            seconds: [S + 1] seconds until each moment and the end, with that degree alone.
            stretch: [S] the factor on seconds of steps after a switch at each moment, above 0.
        """
        degree = self._degrees.index(first)
        rest_s = stretch[:, None] * self._rest_s[:, 0] + self._rest_s[:, 1]
        ways_s = self._switch_s[:, degree] + self._margin_s + seconds[:-1, None] + rest_s
        ways_s[0] = np.inf
        ways_s[:, degree] = np.inf
        least_s = ways_s.min() + ROUNDING_S * len(self._at)
        if seconds[-1] + self._end_s[degree] <= least_s:
            return Path(float(seconds[-1]), ())
        moment = int(np.flatnonzero(ways_s.min(1) <= least_s)[-1])
        following = int(ways_s[moment].argmin())
        total_s, factor, later = float(seconds[moment]), float(stretch[moment]), []
        for then in range(moment, len(self._at)):
            following = following if then == moment else int(self._next[then, degree])
            if following != degree:
                total_s += float(self._switch_s[then, degree, following])
                later.append((self._degrees[following], self._at[then]))
                degree = following
            total_s += factor * float(self._run_s[then, degree])
        return Path(total_s, tuple(later))
