"""What is placed, and where."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.planning.drain import Work
from tailrace.planning.latency import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Samples of one prompt that go to one engine together: a group, or a part of it."""

    group: int
    samples: int
    prompt_tokens: int
    """Of the prompt, whose cache the samples share."""
    expected_tokens: float
    """Of each response. Where nothing is known, the same number for all."""
    deviation: float = 0.0
    """Of the logarithm of that: how far the length may be from it. 0 where it is known, and where nothing is."""
    most_tokens: float = math.inf
    """That a response may have. Many that are taken to be shorter end there."""


def by_length(jobs: Sequence[Job]) -> list[int]:
    """The places of jobs, that of the longest responses first."""
    return sorted(range(len(jobs)), key=lambda job: jobs[job].expected_tokens, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degree:
    """A TP degree that an engine can change to (PAT)."""

    times: StepTimes
    """Its steps, with all of its replicas beside each other."""
    tp: int
    replicas: int
    slots: int
    """As of `EngineState`."""
    cache_tokens: int
    """As of `EngineState`."""
    switch_s: float
    """Seconds to change to it, and back when all is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine as a decision sees it."""

    name: str
    times: StepTimes
    """Its steps. Engines that share a machine slow each other down; their times were taken beside each other."""
    tp: int = 1
    replicas: int = 1
    slots: int
    """The most sequences that a replica decodes together."""
    cache_tokens: int
    """Tokens that a replica's KV cache holds."""
    running: Sequence[Work] = ()
    degrees: Sequence[Degree] = ()
    """Those that it can change to. It does so by itself where that pays, so moves are weighed under the best one."""

    @property
    def room(self) -> int:
        """The most sequences that all replicas together decode at a time."""
        return self.slots * self.replicas

    @property
    def free(self) -> int:
        """The number of sequences that can begin at once."""
        return max(0, self.room - len(self.running))


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision about some jobs."""

    of: list[list[int]]
    """For each engine the places of its jobs among those given, in the order of their start."""
    later: list[int]
    """Jobs that wait until an engine has room, in their order."""


class Policy(Protocol):
    """A way to place jobs."""

    name: str
    plans: bool
    """Whether it weighs all jobs and engines against one another. Jobs are then placed anew when an engine runs dry."""

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        """Place jobs that have not begun.

        Args:
            jobs: in the order of their arrival.
            engines: one or more.
        """
        ...
