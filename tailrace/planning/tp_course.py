"""How an engine drains under one TP degree, seen at the moments at which a switch is weighed.

The moments are those at which the engine asks again: whenever an eighth of the unfinished sequences has ended. A course
is worked out for all sequences at once, in numpy, as if all ran from now on. That takes replicas to advance at the same
pace, which matters for how long they compete. Where some have to wait, `drain` simulates what happens from now on.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.planning.curves import Floats
from tailrace.planning.drain import Drained, Held, drain_held
from tailrace.planning.latency import CorrectedPredictor
from tailrace.types import IntArray

Bools = npt.NDArray[np.bool_]
_LEAST_LEFT = 1e-6
"""The least tokens that are left: sums of seconds are rounded, and 0 · infinity is no number."""


class Course(NamedTuple):
    """The figures of an engine at S moments, the first of which is now."""

    seconds: Floats
    """[S + 1] seconds until each moment, and until all sequences have ended, with this degree from now on."""
    runs_s: Floats
    """[S] seconds from each moment to the next, where the degree began later and sequences were shared out evenly.
    Infinite without room for all that are unfinished.
    """
    unfinished: Floats
    """[S] unfinished sequences."""
    tokens: Floats
    """[S] cached tokens of these together."""
    pairs: Floats
    """[S] sum of the squares of these, by sequence: the pairs of tokens that a prefill of them has."""
    stretch: Floats
    """[S] the most tokens that a response has still to make, over those where all sequences advance alike; above 0."""


def moments(unfinished: int) -> list[int]:
    """Numbers of unfinished sequences: the present one, and each time an eighth less, down to 1."""
    numbers = [unfinished]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] - math.ceil(numbers[-1] / 8))
    return numbers


class InOrder(NamedTuple):
    """Sequences in the order in which they end, whichever replicas they are on."""

    ends_N: Floats
    """[N] remaining tokens."""
    starts_N: Floats
    """[N] those of the one before; 0 for the first."""
    left_N: Floats
    """[N] sequences that are unfinished from each start on."""
    context_N: Floats
    """[N] the present contexts of these together."""
    held_N: Floats
    """[N] those of their tokens that are cached at present, shared prompts once."""
    tokens_N: Floats
    """[N] their cached tokens at each start."""
    pairs_N: Floats
    """[N] the sum of the squares of these at each start."""

    @classmethod
    def of(cls, held: Sequence[Held]) -> "InOrder":
        """Sort them."""
        columns = _columns(held)
        context_N, end_N, cached_N = columns[:, np.argsort(columns[1], kind="stable")]
        start_N = np.append(0.0, end_N[:-1])
        left_N: Floats = np.arange(len(held), 0, -1, dtype=np.float64)
        all_N, held_N, squares_N = (np.cumsum(values[::-1])[::-1] for values in (context_N, cached_N, cached_N**2))
        pairs_N = squares_N + 2 * start_N * held_N + left_N * start_N**2
        return cls(end_N, start_N, left_N, all_N, held_N, held_N + left_N * start_N, pairs_N)

    def on(self, replicas: int) -> "_Segments":
        """The segments of the fullest of equal replicas that advance together."""
        sizes_N: Floats = np.ceil(self.left_N / replicas)
        beside_N = np.minimum(self.left_N, replicas)
        share_N = sizes_N / self.left_N
        tokens = self.context_N * share_N, self.held_N * share_N
        return _Segments.of(self.starts_N, self.ends_N, sizes_N, *tokens, beside_N, sizes_N)


def course(
    predictor: CorrectedPredictor,
    tp: int,
    replicas: Sequence[Sequence[Held]],
    waiting: Sequence[Held],
    in_order: InOrder,
    *,
    slots: int,
    cache_tokens: float,
    at: Sequence[int],
) -> Course:
    """The course under degree `tp`, at the moments `at`: falling numbers of unfinished sequences.

    Args:
        replicas, waiting, slots, cache_tokens: see `drain_held`.
        in_order: all of these sequences.
    """
    number = len(in_order.ends_N)
    if not number:
        nothing = np.zeros(len(at))
        return Course(np.zeros(len(at) + 1), nothing, nothing, nothing, nothing, nothing)
    apart, first_N = _apart(_spread(replicas, waiting))
    even = in_order.on(len(replicas))
    seconds_N = _seconds(predictor, tp, apart, even)
    done = number - np.array(at)
    runs_s = np.diff(_until(np.cumsum(seconds_N[number:]), done))
    runs_s[~np.logical_and.accumulate(even.fits(slots, cache_tokens)[::-1])[::-1][done]] = np.inf
    if not waiting and apart.fits(slots, cache_tokens).all():
        ends_N = np.cumsum(seconds_N[:number])
        ends_N += seconds_N[first_N] - ends_N[first_N]
        seconds = _until(np.sort(ends_N), done)
        left = _most_left(apart.ends, ends_N, first_N, seconds[:-1])
    else:
        states = drain_held(predictor, tp, replicas, waiting, slots=slots, cache_tokens=cache_tokens, stops=at[1:])
        reached = [next(state for state in states if state.unfinished <= number) for number in at[1:]]
        seconds = np.array([0.0, *(state.seconds for state in reached), states[-1].seconds])
        left = np.array([even.ends[-1], *(_longest(state) for state in reached)])
    left_alike = even.ends[-1] - np.where(done > 0, even.ends[done - 1], 0.0)
    stretch = np.where(left_alike > 0, np.maximum(left, _LEAST_LEFT) / np.maximum(left_alike, 1.0), 1.0)
    return Course(seconds, runs_s, np.array(at, np.float64), in_order.tokens_N[done], in_order.pairs_N[done], stretch)


def _until(ends_N: Floats, done: IntArray) -> Floats:
    """[S + 1] seconds until `done` sequences have ended, and all; `ends_N` are sorted."""
    return np.append(np.where(done > 0, ends_N[done - 1], 0.0), ends_N[-1])


def _most_left(tokens_N: Floats, ends_N: Floats, first_N: IntArray, seconds_S: Floats) -> Floats:
    """[S] the most tokens that a sequence has still to make at these times: of each replica that which ends last.

    `tokens_N`, `ends_N`: the tokens that each replica's sequences have made by the end of a segment, and its seconds.
    """
    places_N = np.arange(len(first_N))
    begins_N = first_N == places_N
    firsts = np.flatnonzero(begins_N)
    lasts = np.append(firsts[1:], len(first_N)) - 1
    # one curve of all replicas, whose times follow on each other: to interpolate takes as long as for one of them
    points_KM = np.zeros((2, len(first_N) + len(firsts)))  # each replica begins with no tokens at time 0
    points_KM[:, places_N + np.cumsum(begins_N)] = ends_N, tokens_N
    period_R = (ends_N.max() + 1.0) * np.arange(len(firsts))
    points_KM[0] += np.repeat(period_R, lasts - firsts + 2)
    asked_RS = np.minimum(seconds_S, ends_N[lasts, None]) + period_R[:, None]
    left_RS = tokens_N[lasts, None] - np.interp(asked_RS, *points_KM)
    return np.asarray(left_RS.max(0))


def _longest(state: Drained) -> int:
    return max((remaining for running in (*state.replicas, state.waiting) for _, remaining in running), default=0)


class _Segments(NamedTuple):
    """Between two ends of sequences, [N] of each: what a replica decodes."""

    steps: Floats
    ends: Floats
    """Tokens that each sequence of the replica has made by the end."""
    sizes: Floats
    """B."""
    middle: Floats
    """T at the step in the middle."""
    full: Floats
    """Cached tokens at the end, shared prompts once."""
    beside: Floats
    """Replicas at work, on average."""
    others: Floats
    """B of each other replica at work, on average."""

    @classmethod
    def of(
        cls, start: Floats, end: Floats, sizes: Floats, tokens: Floats, held: Floats, beside: Floats, others: Floats
    ) -> "_Segments":
        """`tokens`, `held`: T, and the cached tokens, before the first of all steps."""
        middle = tokens + sizes * (start + (end - start - 1) / 2)
        return cls(end - start, end, sizes, middle, held + sizes * end, beside, others)

    def fits(self, slots: int, cache_tokens: float) -> Bools:
        """Whether there are places and cache."""
        return np.asarray((self.sizes <= slots) & ((self.full <= cache_tokens) | (self.sizes == 1)))


def _spread(replicas: Sequence[Sequence[Held]], waiting: Sequence[Held]) -> list[list[Held]]:
    """The running and the waiting sequences, each of these on the replica that has fewest."""
    together = [list(running) for running in replicas]
    for held in waiting:
        min(together, key=len).append(held)
    return together


def _apart(replicas: Sequence[Sequence[Held]]) -> tuple[_Segments, IntArray]:
    """The segments of each replica, one replica after the other, and the first segment of the replica of each."""
    columns = _columns([held for running in replicas for held in running])
    counts = np.array([len(running) for running in replicas if running])
    columns = columns[:, np.lexsort((columns[1], np.repeat(np.arange(len(counts)), counts)))]
    end_N, held_KN = columns[1], columns[::2]
    behind = np.cumsum(counts)
    first_N, last_N = np.repeat(behind - counts, counts), np.repeat(behind - 1, counts)
    place_N = np.arange(len(end_N))
    start_N = np.where(place_N > first_N, np.roll(end_N, 1), 0.0)
    sums_KN = np.cumsum(held_KN, axis=1)
    tokens_N, held_N = sums_KN[:, last_N] - sums_KN + held_KN  # of those that have not ended
    some_N = np.maximum(end_N - start_N, 1.0)
    to_end_RN = end_N[behind - 1, None] - start_N
    beside_N = np.clip(to_end_RN, 0.0, some_N).sum(0) / some_N
    sizes_N = (last_N - place_N + 1).astype(np.float64)
    before_N, behind_N = _made(end_N, np.stack([start_N, end_N]))
    left_N = (behind_N - before_N) / some_N  # of all replicas, on average
    others_N = np.where(beside_N > 1, (left_N - sizes_N) / np.maximum(beside_N - 1, _LEAST_LEFT), sizes_N)
    segments = _Segments.of(start_N, end_N, sizes_N, tokens_N, held_N, np.maximum(beside_N, 1.0), others_N)
    return segments, first_N


def _made(ends_N: Floats, at_KN: Floats) -> Floats:
    """[K, N] tokens that all have made together, once each has made so many or has ended."""
    sorted_N = np.sort(ends_N)
    ended_KN = np.searchsorted(sorted_N, at_KN, side="right")
    return np.append(0.0, np.cumsum(sorted_N))[ended_KN] + (len(ends_N) - ended_KN) * at_KN


def _columns(held: Sequence[Held]) -> Floats:
    """[3, N] contexts, remaining and cached tokens; this takes half as long as `np.array`."""
    works, cached = zip(*held, strict=True) if held else ((), ())
    columns = np.empty((3, len(held)))
    columns[:2] = np.fromiter(itertools.chain.from_iterable(works), np.float64, 2 * len(held)).reshape(-1, 2).T
    columns[2] = cached
    return columns


def _seconds(predictor: CorrectedPredictor, tp: int, *segments: _Segments) -> Floats:
    """Seconds of all segments, at once since a call takes as long as a hundred segments."""
    steps, _, sizes, middle, _, beside, others = map(np.concatenate, zip(*segments, strict=True))
    return np.asarray(steps * predictor.steps_s(tp, sizes, middle, beside, others))
