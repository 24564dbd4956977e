"""Functions of one and two variables between points that were measured."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tailrace.types import IntArray

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function of x. It uses tuples and bisect: numpy takes longer for one number.

    Outside the points it goes on as between the last two, never below zero and never downwards.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    slopes: tuple[float, ...]
    """Slope to the right of each point."""
    before: float
    """Slope to the left of the first point."""

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """The function through points (x, y) of different x; a constant where there is one."""
        ordered = sorted(points)
        xs, ys = tuple(x for x, _ in ordered), tuple(y for _, y in ordered)
        if len(xs) == 1:
            return cls(xs, ys, (0.0,), 0.0)
        inner = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]
        return cls(xs, ys, (*inner, max(0.0, inner[-1])), max(0.0, inner[0]))

    def level(self) -> "Curve":
        """The same with the first and the last value outside the points."""
        return replace(self, slopes=(*self.slopes[:-1], 0.0), before=0.0)

    def at(self, x: float) -> float:
        """The value at x."""
        index = bisect_right(self.xs, x) - 1
        if index < 0:
            return max(0.0, self.ys[0] + self.before * (x - self.xs[0]))
        return self.ys[index] + self.slopes[index] * (x - self.xs[index])


@dataclass(frozen=True, slots=True)
class Surface:
    """A function of a size and of x: a curve for each of some sizes, and linear between two sizes at the same x."""

    sizes: tuple[float, ...]
    curves: tuple[Curve, ...]
    before: float
    """Slope over sizes below the smallest."""
    after: float
    """Slope over sizes above the largest: a constant, so that a function monotone in x stays so."""

    @classmethod
    def through(cls, points: Mapping[float, Iterable[tuple[float, float]]]) -> "Surface":
        """The function through points (x, y) by size."""
        sizes = tuple(sorted(points))
        curves = tuple(Curve.through(points[size]) for size in sizes)
        if len(sizes) == 1:
            return cls(sizes, curves, 0.0, 0.0)
        return cls(sizes, curves, _between(sizes, curves, 0), _between(sizes, curves, len(sizes) - 2))

    def at(self, size: float, x: float) -> float:
        """The value at a size and an x."""
        index = bisect_right(self.sizes, size) - 1
        if index < 0:
            return max(0.0, self.curves[0].at(x) + self.before * (size - self.sizes[0]))
        found, low = self.sizes[index], self.curves[index].at(x)
        if size == found:
            return low
        if index == len(self.sizes) - 1:
            return low + self.after * (size - found)
        high = self.curves[index + 1].at(x)
        return low + (size - found) / (self.sizes[index + 1] - found) * (high - low)


def _between(sizes: tuple[float, ...], curves: tuple[Curve, ...], index: int) -> float:
    """The slope from one size to the next, at the largest x that has points of both."""
    x = min(curves[index].xs[-1], curves[index + 1].xs[-1])
    rise = curves[index + 1].at(x) - curves[index].at(x)
    return max(0.0, rise / (sizes[index + 1] - sizes[index]))


class SurfaceArrays:
    """A surface for many points at once."""

    def __init__(self, surface: Surface) -> None:
        longest = max(len(curve.xs) for curve in surface.curves)
        self._surface = surface
        self._sizes = np.array(surface.sizes)
        self._xs, self._ys, self._slopes = (
            np.array([(*row, *[fill] * (longest - len(row))) for row in rows])
            for rows, fill in (
                ([curve.xs for curve in surface.curves], np.inf),
                ([curve.ys for curve in surface.curves], 0.0),
                ([curve.slopes for curve in surface.curves], 0.0),
            )
        )
        self._before = np.array([curve.before for curve in surface.curves])

    def at(self, sizes: Floats, xs: Floats) -> Floats:
        """See `Surface.at`."""
        above = np.searchsorted(self._sizes, sizes, side="right")
        below = np.maximum(above - 1, 0)
        above = np.minimum(above, len(self._sizes) - 1)
        low, start = self._curves(below, xs), self._sizes[below]
        span = self._sizes[above] - start
        beyond = np.where(sizes < start, self._surface.before, self._surface.after) * (sizes - start)
        share = (sizes - start) / np.where(span > 0, span, 1.0)
        inside = low + share * (self._curves(above, xs) - low)
        return np.asarray(np.where((span > 0) & (sizes >= start), inside, np.maximum(0.0, low + beyond)))

    def _curves(self, curves: IntArray, xs: Floats) -> Floats:
        """The values of these curves, [N], at `xs`."""
        points = (self._xs[curves] <= xs[:, None]).sum(1) - 1
        first = np.maximum(points, 0)
        slopes = np.where(points < 0, self._before[curves], self._slopes[curves, first])
        return np.asarray(np.maximum(0.0, self._ys[curves, first] + slopes * (xs - self._xs[curves, first])))
