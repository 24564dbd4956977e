"""Profiles of engine steps: where their time goes. A step is measured while a profiler is set."""

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.engine.scheduling.step import StepInput

PARTS = (
    "schedule",
    "exchange",
    "pack",
    "embed",
    "qkv",
    "attention",
    "out",
    "all_reduce",
    "mlp",
    "head",
    "sample",
    "other",
)
"""Parts of a step in the order of their happening. `schedule` is the driver's part. `exchange` is the time to hand the
step to the ranks and wait for their answer, less the time in which they worked on it. The rest are the parts of the
ranks, and `other` the time that they did not measure by part. A part that a rank calls by another name is kept, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The profile of one step of one replica."""

    prefill_tokens: int
    """Tokens in chunks of several: of prompts, and of responses whose cache was lost. Chunks of one are `decodes`."""
    decodes: int
    """Sequences that computed one token: their newest, or what was left of a prompt."""
    contexts: int
    """Cached tokens that those sequences attended to, in total."""
    seconds: Mapping[str, float]
    """Seconds by part; they add up to the wall time."""
    wall_s: float
    """Seconds of the whole step, scheduling included."""


class Profiler:
    """Keeps the profile of every step until it is taken."""

    def __init__(self) -> None:
        self._steps: list[StepProfile] = []

    def add(self, step: StepInput, ranks: Mapping[str, float], *, schedule_s: float, wall_s: float) -> None:
        """Keep one step.

        Args:
            ranks: `StepOutput.seconds`: the seconds of the ranks by part, `other` included.
            schedule_s: The driver's seconds to choose the chunks and to take in the tokens.
            wall_s: The seconds from the beginning of the choice to the end of taking in.
        """
        decodes = [chunk for chunk in step.chunks if len(chunk.tokens) == 1]
        exchange_s = max(0.0, wall_s - schedule_s - sum(ranks.values()))
        self._steps.append(
            StepProfile(
                prefill_tokens=sum(len(chunk.tokens) for chunk in step.chunks) - len(decodes),
                decodes=len(decodes),
                contexts=sum(chunk.start for chunk in decodes),
                seconds={"schedule": schedule_s, "exchange": exchange_s, **ranks},
                wall_s=wall_s,
            )
        )

    def take(self) -> list[StepProfile]:
        """Return the steps since the last call, in order."""
        steps, self._steps = self._steps, []
        return steps
