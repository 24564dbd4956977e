"""The seconds of engines with jobs, by a model that is linear in the batch.

A step takes about a + b B + c T, with a batch of B sequences and T cached tokens. So an engine that begins all of its
samples at once takes a L + Σ w. L are the tokens of its longest response. w is what one job adds: d p for its prompt of
p tokens, and b l + c (p l + l² / 2) for each of its samples of l tokens. Where samples wait for room, all batches are
full. Then the engine takes a for each step of so many slots instead of a L, if that is more.

Arrays have the axes engines, jobs, and draws of lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.planning.dispatch.base import EngineState, Job

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class JobFigures:
    """The figures of jobs, in their order."""

    samples: Array
    """[jobs]"""
    prompts: Array
    """[jobs] tokens."""
    lengths: Array
    """[jobs] or [draws, jobs]: l, tokens of each response."""

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> "JobFigures":
        """The figures of these jobs, with the lengths that are expected."""
        rows = np.array([(job.samples, job.prompt_tokens, job.expected_tokens) for job in jobs], np.float64)
        return cls(*rows.T)

    def of_lengths(self, lengths: Array) -> "JobFigures":
        """The same jobs with other lengths."""
        return replace(self, lengths=lengths)

    @property
    def tokens(self) -> Array:
        """Of all responses of each job."""
        return self.samples * self.lengths

    @property
    def attended(self) -> Array:
        """The sum of the cached tokens of all steps of each job's samples: p l + l² / 2 for each."""
        return self.tokens * (self.prompts + self.lengths / 2)


@dataclass(frozen=True, slots=True)
class LinearModel:
    """Engines with what they run; each array is [engines]."""

    base: Array
    """a, seconds of a step."""
    each: Array
    """b, seconds for each sequence."""
    context: Array
    """c, seconds for each cached token."""
    prefill: Array
    """d, seconds for each token of a prompt."""
    slots: Array
    """Sequences that decode together, as many as the cache holds of all jobs alike."""
    running: Array
    """Seconds that running sequences add."""
    longest: Array
    """Tokens that the longest of these will still make."""
    left: Array
    """Tokens that all of these will still make."""

    @classmethod
    def of(cls, engines: Sequence[EngineState], jobs: JobFigures) -> "LinearModel":
        """The model of engines between a single sequence and an even share of all samples."""
        mix = _Mix.of(jobs, len(engines))
        return cls(*np.array([_figures(engine, mix) for engine in engines], np.float64).T)

    def added(self, jobs: JobFigures) -> Array:
        """[engines, jobs] w, the seconds that each job adds to each engine."""
        outer = np.multiply.outer
        return np.asarray(
            outer(self.each, jobs.tokens) + outer(self.context, jobs.attended) + outer(self.prefill, jobs.prompts)
        )

    def makespan_s(self, jobs: JobFigures, places: Sequence[Sequence[int]]) -> Array:
        """[draws] seconds until the last engine is done.

        Args:
            jobs: with [draws, jobs] lengths.
            places: see `Placement.of`.
        """
        taking = [index for index, of in enumerate(places) if of]
        order = np.concatenate([places[index] for index in taking])
        starts = np.cumsum([0, *(len(places[index]) for index in taking)])[:-1]

        def by_engine(of_jobs: Array, combine: np.ufunc = np.add) -> Array:
            """[draws, engines]"""
            found = np.zeros((len(of_jobs), len(places)))
            found[:, taking] = combine.reduceat(of_jobs[:, order], starts, axis=1)
            return found

        tokens = by_engine(jobs.tokens)
        steps = np.maximum(by_engine(jobs.lengths, np.maximum), (self.left + tokens) / self.slots)
        seconds = self.running + self.base * np.maximum(steps, self.longest) + self.each * tokens
        seconds += self.context * by_engine(jobs.attended) + self.prefill * by_engine(jobs.prompts[None])
        return np.asarray(seconds.max(1))


class _Mix(NamedTuple):
    """What the jobs have in common."""

    samples: float
    """An even share of all for each engine."""
    held: float
    """Tokens that a sample holds in the cache when it ends, with its part of the prompt."""
    middle: float
    """Tokens that a sequence has in the middle of its response."""
    prompt: float
    """Tokens of a prompt."""

    @classmethod
    def of(cls, jobs: JobFigures, engines: int) -> "_Mix":
        samples = float(jobs.samples.sum())
        return cls(
            samples=samples / engines,
            held=float(jobs.prompts.sum() + jobs.tokens.sum()) / samples,
            middle=float(jobs.samples @ (jobs.prompts + jobs.lengths / 2)) / samples,
            prompt=max(1.0, float(jobs.prompts.mean())),
        )


def _figures(engine: EngineState, mix: _Mix) -> tuple[float, ...]:
    """The fields of `LinearModel` for one engine."""
    size = max(2.0, min(engine.slots, mix.samples / engine.replicas))
    tokens = mix.middle

    def step_s(sequences: float, cached: float) -> float:
        return engine.times.step_s(engine.tp, sequences, sequences * cached, engine.replicas)

    one, many, longer = step_s(1, tokens), step_s(size, tokens), step_s(size, 2 * tokens)
    context = max(0.0, (longer - many) / (size * tokens))
    each = max(0.0, (many - one) / (size - 1) - context * tokens)
    base = max(0.0, one - each - context * tokens)
    prefill = engine.times.prefill_s(engine.tp, 1, mix.prompt) / mix.prompt
    slots = max(1.0, min(engine.slots, engine.cache_tokens / mix.held))
    each, context, prefill, slots = each / engine.replicas, context / engine.replicas, prefill / engine.replicas, slots
    running = sum(left * (each + context * (now + left / 2)) for now, left in engine.running)
    longest = max((left for _, left in engine.running), default=0)
    left = sum(left for _, left in engine.running)
    return base, each, context, prefill, slots * engine.replicas, running, longest, left
