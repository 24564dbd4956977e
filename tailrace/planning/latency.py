"""Predicts how long a step takes: interpolated between profiled points, corrected by measurements of the engine.

Source: PAT, section 4.2 (Online Latency Predictor). A decode step depends on the batch size B and on the context tokens
T of all its sequences together. It is linear in T between points of one B, then linear between the two nearest B. Where
the replicas beside it have another batch, it takes as much more or less as was measured of such batches. A prefill has
a part that grows with the squares of lengths, which is attention, and the rest is linear between points.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tailrace.planning.curves import Curve, Floats, Surface, SurfaceArrays
from tailrace.planning.fits import non_negative
from tailrace.planning.tp_profile import PrefillPoint, TPProfile, UnevenPoint

MOST_CORRECTION = math.log(4.0)
"""Bound of the ratio of measured to predicted time, and of its inverse, as a logarithm."""
COMMON_RATE = 0.05
"""Part of a step's error by which the correction of all degrees moves."""
OWN_RATE = 0.0125
"""Part of a step's error by which the correction of its own degree moves. It is smaller, so that a slowdown of the
whole machine is not attributed to the one degree that is running.
"""


class StepTimes(Protocol):
    """Seconds of an engine's steps under any TP degree that was profiled."""

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """Seconds of a decode step of one replica, with `replicas` of them decoding at the same time.

        Args:
            batch_size: B, sequences of the replica.
            context_tokens: T, cached tokens of those together.
            others: sequences of each other replica at work, on average. None: as many as this one has.
        """
        ...

    def prefill_s(self, tp: int, batch_size: float, length: float) -> float:
        """Seconds to prefill `batch_size` sequences of this length on one replica; see `alike`."""
        ...


class LatencyPredictor:
    """Predicts from a profile alone. Exact on its points."""

    def __init__(self, profile: TPProfile) -> None:
        points: defaultdict[int, defaultdict[int, _Points]] = defaultdict(lambda: defaultdict(_no_points))
        for d in profile.decode:
            points[d.tp][d.replicas][d.batch_size].append((d.context_tokens, d.seconds))
        self._decode = {
            tp: tuple((replicas, Surface.through(by_size)) for replicas, by_size in sorted(by_replicas.items()))
            for tp, by_replicas in points.items()
        }
        self._decode_arrays = {
            tp: [(replicas, SurfaceArrays(surface)) for replicas, surface in surfaces]
            for tp, surfaces in self._decode.items()
        }
        self._uneven = {
            tp: Uneven(point for point in profile.uneven if point.tp == tp)
            for tp in sorted({point.tp for point in profile.uneven})
        }
        self._prefill = {tp: Prefills(point for point in profile.prefill if point.tp == tp) for tp in self._decode}

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """Seconds of a decode step; see `StepTimes`.

        Outside the points it goes on as between the last two, never below zero and never downwards.

        Raises:
            KeyError: the degree was not profiled.
        """
        even = self._even_s(tp, batch_size, context_tokens, replicas)
        if others is None or replicas < 2 or tp not in self._uneven:
            return even
        return even * self._uneven[tp].ratio(batch_size, others)

    def _even_s(self, tp: int, batch_size: float, context_tokens: float, replicas: int) -> float:
        surfaces = self._decode[tp]
        below, surface = surfaces[0]
        if replicas <= below or len(surfaces) == 1:
            return surface.at(batch_size, context_tokens)
        for above, next_surface in surfaces[1:]:
            if replicas < above:
                share = (replicas - below) / (above - below)
                low = surface.at(batch_size, context_tokens)
                return low + share * (next_surface.at(batch_size, context_tokens) - low)
            below, surface = above, next_surface
        return surface.at(batch_size, context_tokens)

    def steps_s(
        self, tp: int, batch_sizes: Floats, context_tokens: Floats, replicas: Floats, others: Floats | None = None
    ) -> Floats:
        """`step_s` of many steps, [N], each with its own figures. Replicas may be at work for a part of the time.

        Raises:
            KeyError: the degree was not profiled.
        """
        seconds = self._evens_s(tp, batch_sizes, context_tokens, replicas)
        if others is None or tp not in self._uneven:
            return seconds
        beside = np.clip(replicas - 1, 0.0, 1.0)
        return np.asarray(seconds * (1 + beside * (self._uneven[tp].ratios(batch_sizes, others) - 1)))

    def _evens_s(self, tp: int, batch_sizes: Floats, context_tokens: Floats, replicas: Floats) -> Floats:
        levels = self._decode_arrays[tp]
        seconds = levels[0][1].at(batch_sizes, context_tokens)
        for (below, _), (above, surface) in itertools.pairwise(levels):
            share = np.clip((replicas - below) / (above - below), 0.0, 1.0)
            # of several levels, those below the last one that is reached no longer count
            seconds = np.where(
                share > 0, seconds + share * (surface.at(batch_sizes, context_tokens) - seconds), seconds
            )
        return seconds

    def prefill_s(self, tp: int, batch_size: float, length: float) -> float:
        """Seconds of a prefill; see `StepTimes` and `Prefills`.

        Raises:
            KeyError: the degree was not profiled.
        """
        return self._prefill[tp].at(batch_size, length)


class Uneven:
    """Steps of a replica whose others have another batch, over those where all have the same, under one degree.

    Two curves over the batch size were measured: beside the smallest batch, and beside the largest. Between these and
    an equal batch the ratio is linear. A constant goes on beyond the points.
    """

    def __init__(self, points: Iterable[UnevenPoint]) -> None:
        """There is one point or more. An equal batch is one of the ratio 1."""
        measured = list(points)
        self._fewest = min(point.others for point in measured)
        self._most = max(point.others for point in measured)
        self._beside_fewest, self._beside_most = (
            _ratios(others, [point for point in measured if point.others == others])
            for others in (self._fewest, self._most)
        )

    def ratio(self, size: float, others: float) -> float:
        """The ratio for a batch size, where each other replica has `others` sequences."""
        return float(self.ratios(np.array([size]), np.array([others]))[0])

    def ratios(self, sizes: Floats, others: Floats) -> Floats:
        """`ratio` of many, [N]."""
        fewer = np.clip((sizes - others) / np.maximum(sizes - self._fewest, 1.0), 0.0, 1.0)
        more = np.clip((others - sizes) / np.maximum(self._most - sizes, 1.0), 0.0, 1.0)
        beside_fewest, beside_most = (np.interp(sizes, *curve) for curve in (self._beside_fewest, self._beside_most))
        return np.asarray(1 + fewer * (beside_fewest - 1) + more * (beside_most - 1))


class Prefills:
    """Seconds of prefills under one degree. Exact on its points.

    Attention takes time in proportion to the sum of squared lengths (PAT, eq. 3). How much is fitted to the points of
    one batch size, together with a constant and a part in proportion to tokens. The rest of each point is what lines
    connect: between lengths of a batch size, then between batch sizes. So times go on as they should beyond the longest
    length. Beyond the largest batch they are in proportion to it.
    """

    def __init__(self, points: Iterable[PrefillPoint]) -> None:
        by_size = _no_points()
        for point in points:
            by_size[point.batch_size].append((point.length, point.seconds))
        self._pair_s = _pair_s(*max(by_size.items(), key=lambda measured: len(measured[1])))
        """Seconds for each pair of tokens of a sequence."""
        # no tokens take no time; this point also extends the curve to the left where a size has one point only
        self._curves = tuple(
            (size, Curve.through([(0, 0.0), *((n, seconds - size * self._pair_s * n * n) for n, seconds in measured)]))
            for size, measured in sorted(by_size.items())
        )

    def at(self, batch_size: float, length: float) -> float:
        """Seconds for `batch_size` sequences of this length."""
        pairs_s = batch_size * self._pair_s * length * length
        below, low = 0.0, 0.0
        for size, curve in self._curves:
            seconds = curve.at(length)
            if batch_size <= size:
                return pairs_s + low + (batch_size - below) / (size - below) * (seconds - low)
            below, low = size, seconds
        return pairs_s + low * batch_size / below


def prefill_errors(profile: TPProfile) -> dict[int, float]:
    """The mean part by which a prefill is off that is predicted from all others, by degree.

    The shortest and the longest of a batch size are not: there is nothing on one side of them. Degrees with no other
    are left out.
    """
    errors: defaultdict[int, list[float]] = defaultdict(list)
    for point in profile.prefill:
        others = [other for other in profile.prefill if other.tp == point.tp and other is not point]
        lengths = [other.length for other in others if other.batch_size == point.batch_size]
        if lengths and min(lengths) < point.length < max(lengths):
            found = Prefills(others).at(point.batch_size, point.length)
            errors[point.tp].append(abs(found - point.seconds) / point.seconds)
    return {tp: statistics.fmean(those) for tp, those in sorted(errors.items())}


def _ratios(others: int, points: Iterable[UnevenPoint]) -> Floats:
    """[2, n] batch sizes, and the ratios of their steps beside batches of `others`."""
    ratios = {others: 1.0} | {point.batch_size: point.seconds / point.even_s for point in points}
    return np.array(sorted(ratios.items())).T


def _pair_s(size: float, measured: Sequence[tuple[float, float]]) -> float:
    """Seconds for each pair of tokens of a sequence; 0 where the lengths are too few to tell."""
    if len(measured) < 3:
        return 0.0
    rows = np.array([(1.0, size * n, size * n * n) for n, _ in measured]) / [[seconds] for _, seconds in measured]
    *_, pair_s = non_negative(rows.T @ rows, rows.sum(0))
    return min(float(pair_s), *(seconds / (size * n * n) for n, seconds in measured))


class DecodedStep(NamedTuple):
    """A decode step of one replica, and what it took."""

    tp: int
    batch_size: int
    context_tokens: int
    replicas: int
    seconds: float
    others: float | None = None
    """See `StepTimes`."""


class CorrectedPredictor:
    """A predictor whose steps are stretched by a slowly moving ratio of measured over predicted.

    Machines drift: clocks, neighbours. The ratio's logarithm is a sum of two parts. The common part holds for all
    degrees and takes up most of an error. The own part is kept for each (degree, replicas) that was seen. So a degree
    that has not run lately drifts along with the one that runs, and the two stay comparable.
    """

    def __init__(self, base: LatencyPredictor) -> None:
        self.base = base
        """The predictor without the correction."""
        self._common = 0.0
        self._own: dict[tuple[int, int], float] = {}

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """See `LatencyPredictor.step_s`."""
        return self.ratio(tp, replicas) * self.base.step_s(tp, batch_size, context_tokens, replicas, others)

    def steps_s(
        self, tp: int, batch_sizes: Floats, context_tokens: Floats, replicas: Floats, others: Floats | None = None
    ) -> Floats:
        """See `LatencyPredictor.steps_s`. Between two numbers of replicas, the ratio is linear."""
        numbers = np.arange(1, math.ceil(replicas.max(initial=1.0)) + 1)
        ratios = [self.ratio(tp, int(number)) for number in numbers]
        predicted = self.base.steps_s(tp, batch_sizes, context_tokens, replicas, others)
        return np.interp(replicas, numbers, ratios) * predicted

    def prefill_s(self, tp: int, batch_size: float, length: float) -> float:
        """Seconds of a prefill as profiled, since no prefill is observed; see `StepTimes`."""
        return self.base.prefill_s(tp, batch_size, length)

    def ratio(self, tp: int, replicas: int) -> float:
        """The factor on predicted steps, from 1/4 to 4."""
        return math.exp(_bounded(self._common + self._own.get((tp, replicas), 0.0)))

    def observe(self, step: DecodedStep) -> None:
        """Learn from a measured decode step. One of no time is ignored.

        Raises:
            KeyError: the degree was not profiled.
        """
        tp, batch_size, context_tokens, replicas, seconds, others = step
        predicted = self.base.step_s(tp, batch_size, context_tokens, replicas, others)
        if not (predicted > 0 and seconds > 0 and math.isfinite(seconds)):
            return
        own = self._own.get((tp, replicas), 0.0)
        error = _bounded(math.log(seconds / predicted)) - (self._common + own)
        self._common = _bounded(self._common + COMMON_RATE * error)
        self._own[tp, replicas] = _bounded(own + OWN_RATE * error)


def alike(lengths: Iterable[float]) -> tuple[float, float]:
    """A number of equal sequences and their length, with the sum and the sum of squares of these lengths.

    Their prefill takes as long, since a part of it goes with tokens and a part with pairs of tokens. PAT's equation 3
    takes as many sequences of the root mean square, which have too many tokens.
    """
    some = list(lengths)
    return alike_by_sums(sum(some), sum(length * length for length in some))


def alike_by_sums(tokens: float, pairs: float) -> tuple[float, float]:
    """The same by the sum of the lengths, and the sum of their squares."""
    return (tokens * tokens / pairs, pairs / tokens) if tokens else (0.0, 0.0)


_Points = defaultdict[float, list[tuple[float, float]]]
"""Points by batch size: (T or L, seconds)."""


def _no_points() -> _Points:
    return defaultdict(list)


def _bounded(logarithm: float) -> float:
    return min(MOST_CORRECTION, max(-MOST_CORRECTION, logarithm))
