"""Seconds of an engine's steps, those included that decode and compute parts of prompts together."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tailrace.planning.latency import StepTimes
from tailrace.planning.step_times.operators import NOTHING, Pass


class Load(NamedTuple):
    """What a replica computes in a step."""

    batch_size: float = 0.0
    """Sequences that decode; 0 or more."""
    context_tokens: float = 0.0
    """Cached tokens of those together."""
    chunk: Pass = NOTHING
    """Parts of prompts."""


class MixedStepTimes(StepTimes, Protocol):
    """Seconds of any step of an engine with chunked prefill."""

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """Seconds of a step that decodes, and computes parts of prompts in the same pass.

        Args:
            batch_size: sequences that decode; 0 or more.
            context_tokens: cached tokens of those together.
            chunk: the parts of prompts.
        """
        ...


class LockstepTimes(MixedStepTimes, Protocol):
    """Seconds of the steps of replicas that share the experts of their layers out."""

    def lockstep_s(self, tp: int, loads: Sequence[Load]) -> float:
        """Seconds of a step of all of these replicas: each waits for the slowest in every layer with experts."""
        ...


class Additive:
    """The steps of others, where a mixed one takes as long as its two halves one after the other."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """See `StepTimes`."""
        return self._times.step_s(tp, batch_size, context_tokens, replicas, others)

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return self._times.prefill_s(tp, batch_size, rms_length)

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """See `MixedStepTimes`. Tokens that a chunk attends to and does not compute cost nothing here."""
        decode_s = self._times.step_s(tp, batch_size, context_tokens, 1) if batch_size else 0.0
        return decode_s + self._times.prefill_s(tp, 1, chunk.tokens)
