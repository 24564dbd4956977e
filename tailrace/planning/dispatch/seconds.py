"""Predicts how long engines take with some jobs.

Where all sequences of an engine decode together from the start, the steps between two ends of sequences are counted at
once. Where some have to wait for room, the engine is simulated from end to end: the samples of a job end together, so
the work grows with the jobs. A job has room where one of its samples has a slot, and the cache holds what all have when
they end. The cache holds a prompt once for all samples of a job.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tailrace.planning.dispatch.base import EngineState, Job
from tailrace.planning.drain import Work


class Pulled(NamedTuple):
    """What engines that pull are predicted to do."""

    seconds: float
    """Until all is done."""
    of: list[list[int]]
    """See `Placement.of`."""


def engine_s(engine: EngineState, jobs: Iterable[Job]) -> float:
    """Seconds until an engine has finished what it runs, and these jobs, begun in this order, under its TP degree."""
    return _engine_s(engine, [_Load.of(job, job.expected_tokens) for job in jobs])


def makespan_s(
    engines: Sequence[EngineState],
    jobs: Sequence[Job],
    places: Sequence[Sequence[int]],
    lengths: Sequence[float] | None = None,
) -> float:
    """Seconds until the last engine is done.

    Args:
        engines: one or more.
        jobs: those that are placed.
        places: see `Placement.of`.
        lengths: [jobs] tokens of responses. None: as expected.
    """
    lengths = [job.expected_tokens for job in jobs] if lengths is None else lengths
    loads = list(map(_Load.of, jobs, lengths))
    return max(_engine_s(engine, [loads[job] for job in of]) for engine, of in zip(engines, places, strict=True))


def pulled(engines: Sequence[EngineState], jobs: Sequence[Job]) -> Pulled:
    """Predict engines that take the next job in its order as they have room for it, as with `simple.Pull`.

    Each is asked whenever one of its own responses ends. Here an engine also looks at its cache.
    """
    return _pulled(engines, [_Load.of(job, job.expected_tokens) for job in jobs])


class _Load(NamedTuple):
    """What is simulated of a job."""

    samples: int
    prompt: int
    """Tokens."""
    made: int
    """Tokens of each response."""
    held: int
    """Tokens in the cache when the job ends."""

    @classmethod
    def of(cls, job: Job, tokens: float) -> "_Load":
        """The job with responses of so many tokens."""
        made = max(1, round(tokens))
        return cls(job.samples, job.prompt_tokens, made, job.prompt_tokens + job.samples * made)


def _engine_s(engine: EngineState, jobs: Sequence[_Load]) -> float:
    if not jobs and not engine.running:
        return 0.0
    samples = len(engine.running) + sum(job.samples for job in jobs)
    tokens = sum(map(sum, engine.running)) + sum(job.held for job in jobs)
    if samples <= engine.room and tokens <= engine.cache_tokens * engine.replicas:
        return _together_s(engine, jobs)
    return _pulled([engine], jobs).seconds


def _pulled(engines: Sequence[EngineState], jobs: Sequence[_Load]) -> Pulled:
    simulated = [_Simulated(engine) for engine in engines]
    places: list[list[int]] = [[] for _ in engines]
    waiting = deque(range(len(jobs)))
    room = [engine.turn(jobs[0], index) for index, engine in enumerate(simulated) if jobs]
    heapify(room)
    while waiting and room:  # one that has no room for the next job is asked again when one of its responses ends
        *_, index = heappop(room)
        engine = simulated[index]
        if engine.has_room_for(jobs[waiting[0]]):
            places[index].append(waiting[0])
            engine.take(jobs[waiting.popleft()])
            heappush(room, engine.turn(jobs[waiting[0] if waiting else -1], index))
    ends = [(engine.begin(), index) for index, engine in enumerate(simulated) if engine.size]
    heapify(ends)
    now = 0.0
    while ends:
        now, index = heappop(ends)
        engine = simulated[index]
        engine.end_first()
        while waiting and engine.has_room_for(jobs[waiting[0]]):
            places[index].append(waiting[0])
            engine.take(jobs[waiting.popleft()])
        if engine.size:
            heappush(ends, (engine.begin(), index))
    return Pulled(now, places)


class _Simulated:
    """An engine that runs to the next end of some of its sequences. Replicas have equal parts of them."""

    def __init__(self, engine: EngineState) -> None:
        self.size = 0
        """Sequences that decode."""
        self._engine = engine
        self._slots = engine.room
        self._cache = engine.cache_tokens * engine.replicas
        self._ends: list[tuple[int, int, int, int]] = []
        """A heap: the step with which sequences end, their number, their tokens then, and those that they hold."""
        self._tokens = 0
        """Of all that decodes, at `_step`."""
        self._held = 0
        self._step = 0
        self._clock = self._ends_at = 0.0
        for context, remaining in engine.running[: self._slots]:
            self._begin(context, remaining, 1, context + remaining)
        self._queue = deque((context, remaining, 1) for context, remaining in engine.running[self._slots :])
        """What it has and does not decode yet: tokens, tokens that it will make, samples."""

    @property
    def free(self) -> int:
        """Slots that nothing decodes in, or waits for."""
        return self._slots - self.size - len(self._queue)

    def turn(self, job: _Load, index: int) -> tuple[float, int, int]:
        """Its place in the order in which engines take jobs, see `simple.Pull`; the lower is first."""
        size = self.size + len(self._queue) + job.samples
        tokens = self._tokens + sum(context for context, *_ in self._queue) + job.samples * job.prompt
        return step_s(self._engine, size, tokens), -self.free, index

    def has_room_for(self, job: _Load) -> bool:
        """Whether the job would begin at once, at least a part of it; an engine without any work takes any job."""
        fits = self.free > 0 and self._held + job.held <= self._cache
        return fits or not (self.size or self._queue)

    def take(self, job: _Load) -> None:
        """Begin with a job, as far as there are slots for it."""
        samples, prompt, made, _ = job
        engine = self._engine
        self._clock += engine.times.prefill_s(engine.tp, 1, prompt) / engine.replicas
        begun = min(samples, self.free)
        self._begin(prompt, made, begun, prompt + begun * made)
        self._queue.extend([(prompt, made, 1)] * (samples - begun))

    def begin(self) -> float:
        """Return the time of the next end."""
        steps = self._ends[0][0] - self._step
        middle = self._tokens + self.size * (steps - 1) / 2
        self._ends_at = self._clock + steps * step_s(self._engine, self.size, middle)
        return self._ends_at

    def end_first(self) -> None:
        """Advance to the next end, and let what the engine has go on with the room."""
        end = self._ends[0][0]
        self._tokens += (end - self._step) * self.size
        self._step, self._clock = end, self._ends_at
        while self._ends and self._ends[0][0] == end:
            _, samples, tokens, held = heappop(self._ends)
            self.size -= samples
            self._tokens -= tokens
            self._held -= held
        engine = self._engine
        while self._queue and self.size < self._slots:
            context, remaining, samples = self._queue.popleft()
            self._clock += engine.times.prefill_s(engine.tp, 1, context) / engine.replicas
            self._begin(context, remaining, samples, context + remaining)

    def _begin(self, context: int, remaining: int, samples: int, held: int) -> None:
        heappush(self._ends, (self._step + remaining, samples, samples * (context + remaining), held))
        self.size += samples
        self._tokens += samples * context
        self._held += held


def _together_s(engine: EngineState, jobs: Sequence[_Load]) -> float:
    """See `engine_s`; all sequences decode from the start. Replicas have equal parts of them."""
    parts = engine.replicas
    prefill = sum(engine.times.prefill_s(engine.tp, 1, job.prompt) for job in jobs) / parts
    seconds, reached = prefill, 0
    size, tokens = 0, 0  # of what still runs, at `reached`
    ends = sorted(_ends(engine.running, jobs))
    for samples, context in ((samples, context) for _, samples, context in ends):
        size += samples
        tokens += samples * context
    for end, samples, context in ends:
        if (steps := end - reached) > 0:
            middle = tokens + size * (steps - 1) / 2
            seconds += steps * step_s(engine, size, middle)
            tokens += size * steps
            reached = end
        size -= samples
        tokens -= samples * (context + end)
    return seconds


def step_s(engine: EngineState, size: int, tokens: float) -> float:
    """Seconds of a step of so many sequences with so many cached tokens.

    A replica has an equal part of them, but no less than one.
    """
    own = max(1.0, size / engine.replicas)
    return engine.times.step_s(engine.tp, own, tokens * own / size, engine.replicas)


def _ends(running: Iterable[Work], jobs: Iterable[_Load]) -> Iterable[tuple[int, int, int]]:
    """The remaining tokens, the number of sequences and the present tokens of each kind of sequence."""
    yield from ((remaining, 1, context) for context, remaining in running)
    for job in jobs:
        yield job.made, job.samples, job.prompt
