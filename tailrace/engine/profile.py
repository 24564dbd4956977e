"""Where the time of engine steps goes: profiles of single steps while a profiler is set, and sums over all of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.engine.scheduling.step import StepInput
from tailrace.host.stopwatch import Stopwatch

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Adds up the time of a replica's steps, by the parts of generation (`registers.phases.PARTS`).

    What computing takes is shared between prefill and decode by their tokens, where a step does both.
    """

    stopwatch: Stopwatch
    """Takes the sums. All replicas of an engine share one."""
    tp: int
    """Ranks of the replica. A lone one does not communicate: its `all_reduce` is only the sum with the residual."""
    has_queue: bool
    """Whether the device has a queue of kernels, as CUDA's has. The host then waits for all kernels of a step where it
    reads the tokens, so sampling and communication cannot be told from computing, and count as that."""

    def add(self, step: StepInput, ranks: Mapping[str, float], *, schedule_s: float) -> None:
        """Add one step; see `Profiler.add`. Time that the ranks were not computing is in no part."""
        sampling = 0.0 if self.has_queue else ranks.get("sample", 0.0)
        communication = ranks.get("all_reduce", 0.0) if self.tp > 1 and not self.has_queue else 0.0
        computing = sum(ranks.values()) - sampling - communication
        lengths = [len(chunk.tokens) for chunk in step.chunks]
        prefill = sum(length for length in lengths if length > 1) / sum(lengths) if lengths else 0.0
        add = self.stopwatch.add
        add("prefill", computing * prefill)
        add("decode", computing * (1 - prefill))
        add("sampling", sampling)
        add("communication", communication)
        add("scheduling", schedule_s)
