"""Where the time of engine steps goes. The core adds a line for each step while a profiler is set."""

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.engine.step import StepInput

PARTS = ("schedule", "exchange", "embed", "qkv", "attention", "out", "all_reduce", "mlp", "head", "sample")
"""Parts of a step in the order of their happening. The driver measures the first two, the ranks the rest; what a rank
calls by another name is kept, too. `exchange` is handing the step to the ranks and waiting for their answer, less the
time in which they computed."""
OTHER = "other"
"""What none of the parts covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One step of one replica."""

    prefill_tokens: int
    """Prompt tokens computed."""
    decodes: int
    """Sequences that computed their newest token alone."""
    contexts: int
    """Cached tokens that those sequences attended to, in all."""
    seconds: Mapping[str, float]
    """By part; they do not overlap."""
    wall_s: float
    """Of the whole step, scheduling included."""

    @property
    def other_s(self) -> float:
        """Seconds that no part covers."""
        return max(0.0, self.wall_s - sum(self.seconds.values()))


class Profiler:
    """Keeps the profile of every step until it is taken."""

    def __init__(self) -> None:
        self._steps: list[StepProfile] = []

    def add(self, step: StepInput, seconds: Mapping[str, float], wall_s: float) -> None:
        """Keep one step: `seconds` by part, those of the ranks (`StepOutput.seconds`) and the driver's together."""
        decodes = [chunk for chunk in step.chunks if len(chunk.tokens) == 1]
        self._steps.append(
            StepProfile(
                prefill_tokens=sum(len(chunk.tokens) for chunk in step.chunks) - len(decodes),
                decodes=len(decodes),
                contexts=sum(chunk.start for chunk in decodes),
                seconds=seconds,
                wall_s=wall_s,
            )
        )

    def take(self) -> list[StepProfile]:
        """The steps since the last call, in order."""
        steps, self._steps = self._steps, []
        return steps
