"""The placement with the least predicted makespan, as far as a search finds it.

A step takes about a + b B + c T, with a batch of B sequences and T cached tokens. So an engine that begins all of its
samples at once takes a L + Σ w. L are the tokens of its longest response. w is what one job adds to the batches: for
each of its samples b l + c (p l + l² / 2), with p tokens of the prompt and l of the response. An engine with a long
response pays a L in any case. Hence jobs of like lengths go together: the longest ones to the first engine, the next
ones to the second, and so on, so many that all engines take equally long. That is Algorithm 2 of StreamRL for any
number of kinds. Where the batch costs more than its longest response, it is better to distribute the long ones: longest
first, each to the engine that is done first with it (Graham 1969, LPT). The better of the two is taken, and then jobs
move from the slowest engine to the quickest, as long as the simulated makespan falls.

Where many jobs wait for room, the model says little: it has no moment at which a job begins. There the simulation of
engines that pull the longest first is a third way.

Expectations may err. A long response that was taken for a short one runs in a large batch, and the step waits for it.
So lengths are drawn as they might be, and that way is taken whose makespan is the least in the mean of the draws. A
further way is there, the same mix of lengths for every engine. It hardly rests on expectations, so that wrong ones cost
little.

Engines may differ in speed, TP degree and room.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tailrace.planning.dispatch.base import EngineState, Job, Placement
from tailrace.planning.dispatch.seconds import engine_s, makespan_s, pulled

_TRIALS = 48
"""Moves of one job that are simulated."""
_ROUNDS = 30
"""Halvings of the interval in which the makespan is searched."""
_ROUNDING = 1e-6
"""Part of a sum of seconds that may be lost by rounding."""
_GAIN = 1e-9
"""The least part of the makespan that a move has to gain."""
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
        order = sorted(range(len(jobs)), key=lambda job: jobs[job].expected_tokens, reverse=True)
        ordered = [jobs[job] for job in order]
        costs = _costs(engines, ordered)
        ways = [each.of for each in sorted((_together(costs), _apart(costs)), key=lambda found: found.seconds)]
        known = not any(job.deviation for job in jobs)
        if known:
            del ways[1:]
        seconds = _improve(ordered, engines, ways[0])
        samples = sum(job.samples for job in jobs) + sum(len(engine.running) for engine in engines)
        if samples > sum(each.kind.slots for each in costs):
            pulling = pulled(engines, ordered)
            ways.insert(0 if pulling.seconds < seconds else 1, pulling.of)
        best = ways[0] if known else _surest(ordered, engines, [*ways, _dealt(len(order), len(engines))])
        return Placement([[order[place] for place in sorted(of)] for of in best], [])


Places = list[list[int]]
"""For each engine its jobs, by their places in the descending order of lengths."""


class _Found(NamedTuple):
    seconds: float
    """The makespan by the linear model."""
    of: Places


@dataclass(frozen=True, slots=True)
class _Kind:
    """What jobs cost on engines of one kind by the linear model, for the jobs in descending order of their lengths."""

    base: float
    """a, seconds of a step."""
    each: float
    """b"""
    context: float
    """c"""
    slots: float
    """Sequences that decode together, as many as the cache holds of all jobs alike."""
    lengths: list[float]
    """l of each job."""
    tokens: list[float]
    """Tokens of all responses of each job."""
    added: list[float]
    """w of each job."""
    sums: list[float]
    """The sum of w of all jobs before each, and of all."""
    full: list[float]
    """The same with the seconds that a job keeps a slot: where samples wait, all batches are full."""

    @classmethod
    def of(cls, engine: EngineState, ordered: Sequence[Job], engines: int) -> "_Kind":
        """`ordered`: by descending length. `engines`: the number of all."""
        base, each, context = _linear(engine, ordered, engines)
        lengths = [job.expected_tokens for job in ordered]
        tokens = [job.samples * job.expected_tokens for job in ordered]
        added = [
            made * (each + context * (job.prompt_tokens + job.expected_tokens / 2))
            for job, made in zip(ordered, tokens, strict=True)
        ]
        samples = sum(job.samples for job in ordered)
        held = sum(job.prompt_tokens for job in ordered) + sum(tokens)
        slots = max(1.0, min(engine.slots, engine.cache_tokens * samples / held)) * engine.replicas
        return cls(
            base=base,
            each=each,
            context=context,
            slots=slots,
            lengths=lengths,
            tokens=tokens,
            added=added,
            sums=list(accumulate(added, initial=0.0)),
            full=list(accumulate((w + base * t / slots for w, t in zip(added, tokens, strict=True)), initial=0.0)),
        )


@dataclass(frozen=True, slots=True)
class _Costs:
    """What an engine costs with what it runs."""

    kind: _Kind
    running: float
    """Seconds that the batches of running sequences add."""
    longest: float
    """Tokens that the longest of these will still make."""
    left: float
    """Tokens that all of these will still make."""

    @classmethod
    def of(cls, engine: EngineState, kind: _Kind) -> "_Costs":
        """The costs of an engine of this kind."""
        return cls(
            kind=kind,
            running=sum(left * (kind.each + kind.context * (now + left / 2)) for now, left in engine.running),
            longest=max((left for _, left in engine.running), default=0),
            left=sum(left for _, left in engine.running),
        )

    @property
    def most(self) -> float:
        """Seconds with all jobs, or more; a little more even where sums are rounded."""
        kind = self.kind
        exact = self.running + kind.full[-1] + kind.base * max(self.longest, self.left, kind.lengths[0])
        return exact * (1 + _ROUNDING)

    def end(self, first: int, limit: float) -> int:
        """The first job that no longer fits, where the engine takes those from `first` on and has `limit` seconds."""
        kind = self.kind
        spent = self.running + kind.base * max(self.longest, kind.lengths[first])
        together = bisect_right(kind.sums, kind.sums[first] + limit - spent) - 1
        waiting = self.running + kind.base * self.left / kind.slots
        return max(first, min(together, bisect_right(kind.full, kind.full[first] + limit - waiting) - 1))


def _costs(engines: Sequence[EngineState], ordered: Sequence[Job]) -> list[_Costs]:
    """The costs of each engine; those of one kind share what they have in common."""
    kinds: dict[tuple[int, int, int, int, int], _Kind] = {}
    for engine in engines:
        key = _key(engine)
        kinds[key] = kinds.get(key) or _Kind.of(engine, ordered, len(engines))
    return [_Costs.of(engine, kinds[_key(engine)]) for engine in engines]


def _key(engine: EngineState) -> tuple[int, int, int, int, int]:
    return id(engine.times), engine.tp, engine.replicas, engine.slots, engine.cache_tokens


def _linear(engine: EngineState, jobs: Sequence[Job], engines: int) -> tuple[float, float, float]:
    """a, b and c of an engine, between a single sequence and an even share of all samples."""
    samples = sum(job.samples for job in jobs)
    tokens = sum(job.samples * (job.prompt_tokens + job.expected_tokens / 2) for job in jobs) / samples
    size = max(2.0, min(engine.slots, samples / engines / engine.replicas))

    def step_s(sequences: float, cached: float) -> float:
        return engine.times.step_s(engine.tp, sequences, sequences * cached, engine.replicas)

    one, many, longer = step_s(1, tokens), step_s(size, tokens), step_s(size, 2 * tokens)
    context = max(0.0, (longer - many) / (size * tokens))
    each = max(0.0, (many - one) / (size - 1) - context * tokens)
    base = max(0.0, one - each - context * tokens)
    return base, each / engine.replicas, context / engine.replicas


def _together(costs: Sequence[_Costs]) -> _Found:
    """Each engine has jobs of like lengths, the one with the shortest steps the longest."""
    jobs = len(costs[0].kind.lengths)
    quickest = sorted(range(len(costs)), key=lambda index: costs[index].kind.base)

    def cut(limit: float) -> list[int]:
        """The end of each engine's jobs, in the order of `quickest`."""
        ends, first = [], 0
        for index in quickest:
            first = costs[index].end(first, limit) if first < jobs else first
            ends.append(first)
        return ends

    low, high = 0.0, max(each.most for each in costs)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1] == jobs else (middle, high)
    places: Places = [[] for _ in costs]
    first = 0
    for index, end in zip(quickest, cut(high), strict=True):
        places[index] = list(range(first, end))
        first = end
    return _Found(high, places)


def _apart(costs: Sequence[_Costs]) -> _Found:
    """Longest first, each to the engine that is done first with it."""
    places: Places = [[] for _ in costs]
    kinds = [each.kind for each in costs]
    base = np.array([kind.base for kind in kinds])
    slots = np.array([kind.slots for kind in kinds], np.float64)
    longest = np.array([each.longest for each in costs], np.float64)
    left = np.array([each.left for each in costs], np.float64)
    spent = np.array([each.running for each in costs], np.float64)
    added = np.array([kind.added for kind in kinds]).T
    for place, (length, tokens) in enumerate(zip(kinds[0].lengths, kinds[0].tokens, strict=True)):
        steps = np.maximum(np.maximum(longest, length), (left + tokens) / slots)
        index = int((base * steps + spent + added[place]).argmin())
        places[index].append(place)
        longest[index] = max(longest[index], length)
        left[index] += tokens
        spent[index] += added[place, index]
    return _Found(float(np.max(base * np.maximum(longest, left / slots) + spent)), places)


def _dealt(jobs: int, engines: int) -> Places:
    """The same mix of lengths for every engine: there and back, so that none has the longer one each time."""
    places: Places = [[] for _ in range(engines)]
    for place in range(jobs):
        turn = place % (2 * engines)
        places[min(turn, 2 * engines - 1 - turn)].append(place)
    return places


def _surest(ordered: Sequence[Job], engines: Sequence[EngineState], ways: Sequence[Places]) -> Places:
    """The way with the least makespan, in the mean of lengths as they might be."""
    errors = np.random.default_rng(0).standard_normal((_DRAWS, len(ordered)))
    draws = [[_drawn(job, error) for job, error in zip(ordered, each, strict=True)] for each in errors.tolist()]
    return min(ways, key=lambda way: sum(makespan_s(engines, draw, way) for draw in draws))


def _drawn(job: Job, error: float) -> Job:
    tokens = job.expected_tokens * math.exp(error * job.deviation)
    return replace(job, expected_tokens=max(1.0, min(tokens, job.most_tokens)))


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
