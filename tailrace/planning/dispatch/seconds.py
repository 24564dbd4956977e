"""Predicts how long an engine takes with some jobs.

Where all of its sequences decode together from the start, the steps between two ends of sequences are counted at once.
Where some have to wait for room, the engine is simulated (`planning.drain`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tailrace.planning.dispatch.base import EngineState, Job
from tailrace.planning.drain import Work, drain_s
from tailrace.planning.latency import StepTimes


def engine_s(engine: EngineState, jobs: Sequence[Job]) -> float:
    """Seconds until an engine has finished what it runs, and these jobs, begun in this order."""
    if not jobs and not engine.running:
        return 0.0
    slots = _slots(engine, jobs)
    if len(engine.running) + sum(job.samples for job in jobs) <= slots * engine.replicas:
        return _together_s(engine, jobs)
    running = [list(engine.running[first :: engine.replicas]) for first in range(engine.replicas)]
    waiting = [job.work for job in jobs for _ in range(job.samples)]
    return drain_s(engine.times, engine.tp, running, waiting, slots=slots)


def makespan_s(engines: Sequence[EngineState], jobs: Sequence[Job], places: Sequence[Sequence[int]]) -> float:
    """Seconds until the last engine is done. `places`: see `Placement.of`."""
    return max(engine_s(engine, [jobs[job] for job in of]) for engine, of in zip(engines, places, strict=True))


def pull_s(engines: Sequence[EngineState], jobs: Sequence[Job]) -> float:
    """Seconds until all is done where equal engines take the next sample in its order as they have room.

    Args:
        engines: of one kind, one replica each.
    """
    first = engines[0]
    slots = _slots(first, jobs)
    waiting = [job.work for job in jobs for _ in range(job.samples)]
    return drain_s(_Apart(first.times), first.tp, [engine.running for engine in engines], waiting, slots=slots)


@dataclass(frozen=True, slots=True)
class _Apart:
    """The steps of engines that do not slow each other down."""

    times: StepTimes

    def step_s(self, tp: int, batch_size: float, context_tokens: float, replicas: int) -> float:
        """See `StepTimes`."""
        return self.times.step_s(tp, batch_size, context_tokens, 1)

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return self.times.prefill_s(tp, batch_size, rms_length)


def _slots(engine: EngineState, jobs: Sequence[Job]) -> int:
    """The most sequences of a replica: `slots`, or as many as its cache holds at their mean length when they end.

    The cache holds a prompt once for all samples of a job.
    """
    ends = sum(context + remaining for context, remaining in engine.running)
    ends += sum(prompt + job.samples * tokens for job in jobs for prompt, tokens in (job.work,))
    count = len(engine.running) + sum(job.samples for job in jobs)
    return max(1, min(engine.slots, int(engine.cache_tokens * count / ends)))


def _together_s(engine: EngineState, jobs: Sequence[Job]) -> float:
    """See `engine_s`; all sequences decode from the start. Replicas have equal parts of them."""
    parts = engine.replicas
    prefill = sum(engine.times.prefill_s(engine.tp, 1, job.prompt_tokens) for job in jobs) / parts
    seconds, reached = prefill, 0
    size, tokens = 0, 0  # of what still runs, at `reached`
    ends = sorted(_ends(engine.running, jobs))
    for samples, context in ((samples, context) for _, samples, context in ends):
        size += samples
        tokens += samples * context
    for end, samples, context in ends:
        if (steps := end - reached) > 0:
            middle = tokens + size * (steps - 1) / 2
            seconds += steps * engine.times.step_s(engine.tp, size / parts, middle / parts, parts)
            tokens += size * steps
            reached = end
        size -= samples
        tokens -= samples * (context + end)
    return seconds


def _ends(running: Iterable[Work], jobs: Iterable[Job]) -> Iterable[tuple[int, int, int]]:
    """The remaining tokens, the number of sequences and the present tokens of each kind of sequence."""
    yield from ((remaining, 1, context) for context, remaining in running)
    for job in jobs:
        context, remaining = job.work
        yield remaining, job.samples, context
