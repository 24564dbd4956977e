"""The placement with the least predicted makespan, as far as a search finds it.

By the linear model ([linear.py](linear.py)) an engine takes a L + Σ w: so many seconds for each step of its longest
response, and what each job adds. An engine with a long response pays a L in any case. Hence jobs of like lengths go
together: the longest ones to the first engine, the next ones to the second, and so on, so many that all engines take
equally long. That is Algorithm 2 of StreamRL for any number of kinds. Where the batch costs more than its longest
response, it is better to distribute the long ones: longest first, each to the engine that is done first with it (Graham
1969, LPT). The better of the two is taken, and then jobs move from the slowest engine to the quickest, as long as the
simulated makespan falls.

Where many jobs wait for room, the model says little: it has no moment at which a job begins. There the simulation of
engines that pull the longest first is a third way.

Expectations may err. A long response that was taken for a short one runs in a large batch, and the step waits for it.
So lengths are drawn as they might be, and that way is taken whose makespan is the least in the mean of the draws: the
makespan by the model where all samples begin at once, the simulated one where some wait. A further way is there, the
same mix of lengths for every engine. It hardly rests on expectations, so that wrong ones cost little.

Engines may differ in speed, TP degree and room.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.planning.dispatch.base import EngineState, Job, Placement, by_length
from tailrace.planning.dispatch.linear import Array, JobFigures, LinearModel
from tailrace.planning.dispatch.seconds import engine_s, makespan_s, pulled

_TRIALS = 48
"""Moves of one job that are simulated."""
_ROUNDS = 30
"""Halvings of the interval in which the makespan is searched."""
_ROUNDING = 1e-6
"""Part of a sum of seconds that may be lost by rounding."""
_GAIN = 1e-9
"""The least part of the makespan that a move has to gain."""
_TIE = 1e-3
"""Part of the makespan by which the model may err. Often one long response is all of it, whoever has the others; then
the long ones are distributed, since short ones alone fill an engine so that some wait.
"""
_DRAWS = 3
"""Draws of the lengths of all jobs."""


class Balanced:
    """See the module."""

    name = "skewness_aware"
    plans = True

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        """See `Policy`. All jobs are placed; those of an engine begin with the longest (StreamRL, section 5.3)."""
        if not jobs:
            return Placement([[] for _ in engines], [])
        order = by_length(jobs)
        of = _way([jobs[job] for job in order], engines)
        return Placement([[order[place] for place in sorted(each)] for each in of], [])


Places = list[list[int]]
"""For each engine its jobs, by their places in the descending order of lengths."""


def _way(ordered: Sequence[Job], engines: Sequence[EngineState]) -> Places:
    figures = JobFigures.of(ordered)
    model = LinearModel.of(engines, figures)
    added = model.added(figures)
    expected = figures.of_lengths(figures.lengths[None])
    ways = [_apart(model, figures, added), _together(model, figures, added)]
    apart, together = (model.makespan_s(expected, way)[0] for way in ways)
    if together < apart * (1 - _TIE):
        ways.reverse()
    known = not any(job.deviation for job in ordered)
    if known:
        del ways[1:]
    seconds = _improve(ordered, engines, ways[0])
    waiting = figures.samples.sum() + sum(len(engine.running) for engine in engines) > model.slots.sum()
    if waiting:
        pulling = pulled(engines, ordered)
        ways.insert(0 if pulling.seconds < seconds else 1, pulling.of)
    if known:
        return ways[0]
    ways.append(_dealt(len(ordered), len(engines)))
    drawn = _drawn(ordered)
    if waiting:
        return min(ways, key=lambda way: sum(makespan_s(engines, ordered, way, lengths) for lengths in drawn.tolist()))
    might = figures.of_lengths(drawn)
    return min(ways, key=lambda way: model.makespan_s(might, way).sum())


@dataclass(frozen=True, slots=True)
class _Taker:
    """An engine that takes jobs in descending order of their lengths, by the linear model."""

    base: float
    slots: float
    running: float
    longest: float
    left: float
    """As of `LinearModel`."""
    lengths: Sequence[float]
    """l of each job."""
    sums: "memoryview[float]"
    """The sum of w of all jobs before each, and of all. A list of so many numbers takes longer to make than to use."""
    full: "memoryview[float]"
    """The same with the seconds that a job keeps a slot: where samples wait, all batches are full."""

    @property
    def most(self) -> float:
        """Seconds with all jobs, or more; a little more even where sums are rounded."""
        exact = self.running + self.full[-1] + self.base * max(self.longest, self.left, self.lengths[0])
        return exact * (1 + _ROUNDING)

    def end(self, first: int, limit: float) -> int:
        """The first job that no longer fits, where the engine takes those from `first` on and has `limit` seconds."""
        spent = self.running + self.base * max(self.longest, self.lengths[first])
        together = bisect_right(self.sums, self.sums[first] + limit - spent) - 1
        waiting = self.running + self.base * self.left / self.slots
        return max(first, min(together, bisect_right(self.full, self.full[first] + limit - waiting) - 1))


def _takers(model: LinearModel, jobs: JobFigures, added: Array) -> list[_Taker]:
    lengths = jobs.lengths.tolist()
    kept = np.multiply.outer(model.base / model.slots, jobs.tokens)
    sums, full = (np.pad(np.cumsum(each, axis=1), ((0, 0), (1, 0))) for each in (added, added + kept))
    columns = (model.base, model.slots, model.running, model.longest, model.left)
    return [
        _Taker(base, slots, running, longest, left, lengths, memoryview(own), memoryview(waiting))
        for (base, slots, running, longest, left), own, waiting in zip(
            np.array(columns).T.tolist(), sums, full, strict=True
        )
    ]


def _together(model: LinearModel, jobs: JobFigures, added: Array) -> Places:
    """Each engine has jobs of like lengths, the one with the shortest steps the longest."""
    count = len(jobs.lengths)
    takers = _takers(model, jobs, added)
    quickest = np.argsort(model.base, kind="stable").tolist()

    def cut(limit: float) -> list[int]:
        """The end of each engine's jobs, in the order of `quickest`; engines beyond the last job are left out."""
        ends, first = [], 0
        for index in quickest:
            first = takers[index].end(first, limit)
            ends.append(first)
            if first == count:
                break
        return ends

    low, high = 0.0, max(taker.most for taker in takers)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1] == count else (middle, high)
    places: Places = [[] for _ in takers]
    first = 0
    for index, end in zip(quickest, cut(high), strict=False):
        places[index] = list(range(first, end))
        first = end
    return places


def _apart(model: LinearModel, jobs: JobFigures, added: Array) -> Places:
    """Longest first, each to the engine that is done first with it."""
    places: Places = [[] for _ in model.base]
    longest, left, spent = model.base * model.longest, model.base * model.left / model.slots, model.running.copy()
    alone, kept = np.multiply.outer(jobs.lengths, model.base), np.multiply.outer(jobs.tokens, model.base / model.slots)
    seconds = np.empty_like(spent)
    for place, (length, tokens, more) in enumerate(zip(alone, kept, np.ascontiguousarray(added.T), strict=True)):
        np.add(left, tokens, out=seconds)
        np.maximum(seconds, longest, out=seconds)
        np.maximum(seconds, length, out=seconds)
        seconds += spent
        seconds += more
        index = int(seconds.argmin())
        places[index].append(place)
        longest[index] = max(longest[index], length[index])
        left[index] += tokens[index]
        spent[index] += more[index]
    return places


def _dealt(jobs: int, engines: int) -> Places:
    """The same mix of lengths for every engine: there and back, so that none has the longer one each time."""
    places: Places = [[] for _ in range(engines)]
    for place in range(jobs):
        turn = place % (2 * engines)
        places[min(turn, 2 * engines - 1 - turn)].append(place)
    return places


def _drawn(ordered: Sequence[Job]) -> Array:
    """[draws, jobs] tokens of responses, as they might be."""
    expected, deviation, most = np.array([(job.expected_tokens, job.deviation, job.most_tokens) for job in ordered]).T
    errors = np.random.default_rng(0).standard_normal((_DRAWS, len(ordered)))
    return np.asarray(np.clip(expected * np.exp(errors * deviation), 1.0, most))


def _improve(ordered: Sequence[Job], engines: Sequence[EngineState], places: Places) -> float:
    """Move single jobs from the slowest engine to the one that is done first, while that is predicted to gain.

    Returns:
        The predicted seconds until all is done.
    """

    def seconds(index: int, of: Sequence[int]) -> float:
        return engine_s(engines[index], [ordered[place] for place in sorted(of)])

    taken = [seconds(index, of) for index, of in enumerate(places)]
    trials = 0
    while True:
        slowest, quickest = int(np.argmax(taken)), int(np.argmin(taken))
        for job in sorted(places[slowest], reverse=True):
            trials += 1
            less = [other for other in places[slowest] if other != job]
            more = [*places[quickest], job]
            after = seconds(slowest, less), seconds(quickest, more)
            if max(after) < taken[slowest] * (1 - _GAIN):
                places[slowest], places[quickest] = less, more
                taken[slowest], taken[quickest] = after
                break
            if trials >= _TRIALS:
                return max(taken)
        else:
            return max(taken)
