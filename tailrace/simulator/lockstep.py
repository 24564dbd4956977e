"""Replicas that share the experts of their layers out, and so make their steps together.

In every layer with experts, each sends the vectors of its tokens to the ranks that have these, and waits for all
others. So a replica that only decodes waits for one that computes a prompt, and one with nothing to do takes part.
Together they have stretches as one `Batch` has; sequences are added to the single ones.
"""

from collections.abc import Sequence as List

from tailrace.planning.step_times.base import LockstepTimes
from tailrace.simulator.batch import Batch, Ended


class Lockstep:
    """Batches whose steps begin and end together."""

    def __init__(self, times: LockstepTimes, batches: List[Batch]) -> None:
        self.times = times
        self.batches = batches

    def begin(self) -> float | None:
        """Begin a stretch. Return its seconds; None where there is nothing to do."""
        prepared = [batch.prepare() for batch in self.batches]
        steps = min((each for each in prepared if each is not None), default=None)
        if steps is None:
            return None
        loads = [batch.load(steps) for batch in self.batches]
        step_s = self.times.lockstep_s(self.batches[0].tp, loads)
        for batch in self.batches:
            batch.start(steps, step_s)
        return steps * step_s

    def cut(self, elapsed_s: float) -> float:
        """Let the stretch under way stop after the present step, `elapsed_s` after it began. Return its seconds."""
        return max(batch.cut(elapsed_s) for batch in self.batches)

    def end(self) -> Ended:
        """End the stretch under way."""
        each = [batch.end() for batch in self.batches]
        return Ended([s for one in each for s in one.started], [s for one in each for s in one.ended])
