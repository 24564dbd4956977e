"""The time of each worker by phase, over a whole run or some of its steps: the shares add up to 1.

    for worker in breakdown_of(run.events, run.steps):       # or [run.steps[3]] for one step
        print(worker.worker, worker.share("generation"), worker.parts["generation"]["decode"])

Events of a worker do not end where a step does. One that is only partly in a step counts for it in proportion, so that
a figure of one step is as fine as the worker's events, about a second.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from tailrace.events import Event
from tailrace.registers.events import EventKind
from tailrace.registers.phases import PARTS, PHASES, Phase
from tailrace.report.lanes import Span
from tailrace.report.workers import worker_of, worker_order

REST = "other"
"""The part of a phase that its engine or trainer has not told."""


@dataclass(frozen=True)
class WorkerTime:
    """The time of one worker."""

    worker: str
    told: dict[str, float]
    """The sums of its events `breakdown`: seconds by phase, and by `<phase>/<part>`."""

    @property
    def seconds(self) -> float:
        """The seconds that are accounted for."""
        return sum(self.told.get(phase, 0.0) for phase in PHASES)

    def share(self, phase: Phase) -> float:
        """The part of its time that a phase took."""
        return self.told.get(phase, 0.0) / self.seconds if self.seconds > 0 else 0.0

    @cached_property
    def parts(self) -> dict[Phase, dict[str, float]]:
        """Of each phase whose parts are known, the share of the worker's time that each part took, `other` included.

        They add up to the share of the phase. Replicas compute beside each other, so their parts may take more seconds
        than there are; then each counts in proportion.
        """
        return {phase: parts for phase in PARTS if (parts := self._parts_of(phase))}

    def _parts_of(self, phase: Phase) -> dict[str, float]:
        told = {part: self.told[name] for part in PARTS[phase] if (name := f"{phase}/{part}") in self.told}
        whole, total = self.told.get(phase, 0.0), sum(told.values())
        if not told or not whole:
            return {}
        scale = self.share(phase) / max(whole, total)
        return {**{part: seconds * scale for part, seconds in told.items()}, REST: max(0.0, whole - total) * scale}


def breakdown_of(events: Iterable[Event], steps: Sequence[Span]) -> list[WorkerTime]:
    """Return the time of each worker during some steps; workers without events are left out.

    `events`: those of a run, or of several of its workers. `steps`: none overlaps another.
    """
    (times,) = breakdown_by_block(events, [steps])
    return times


def breakdown_by_block(events: Iterable[Event], blocks: Sequence[Sequence[Span]]) -> list[list[WorkerTime]]:
    """Return what `breakdown_of` does, for each of several blocks of steps. No step overlaps another."""
    told = told_by_block(events, EventKind.BREAKDOWN, blocks)
    return [[WorkerTime(worker, by_name[worker]) for worker in sorted(by_name, key=worker_order)] for by_name in told]


def told_by_block(
    events: Iterable[Event], kind: EventKind, blocks: Sequence[Sequence[Span]]
) -> list[dict[str, dict[str, float]]]:
    """Return the sums of the metrics of events of a kind, by worker, for each of several blocks of steps.

    An event that is only partly in a step counts in proportion. No step overlaps another.
    """
    steps = sorted((step.end, step.start, block) for block, part in enumerate(blocks) for step in part)
    ends = [end for end, _, _ in steps]
    told: list[dict[str, dict[str, float]]] = [{} for _ in blocks]
    for event in events:
        if event.task == kind and event.end > event.start:
            for end, start, block in islice(steps, bisect_right(ends, event.start), None):
                if start >= event.end:
                    break
                part = (min(event.end, end) - max(event.start, start)) / (event.end - event.start)
                _add(told[block].setdefault(worker_of(event), {}), event, part)
    return told


def _add(seconds: dict[str, float], event: Event, part: float) -> None:
    for name, spent in event.metrics.items():
        seconds[name] = seconds.get(name, 0.0) + part * spent
