"""A model that scores responses, in simulated time: a reference with frozen weights, or a critic with those it has.

A group is scored once its responses have ended. With devices of its own, the next free one of the workers takes the
next group. On devices that it shares, the scorer claims all groups that are there, and takes its turn.
"""

from collections.abc import Callable, Sequence
from heapq import heapreplace
from typing import Any, Protocol

from tailrace.activity import Activity
from tailrace.events import Event
from tailrace.planning.packing import plan_micro_batches
from tailrace.registers.events import EventKind
from tailrace.registers.phases import Work
from tailrace.simulator.agenda import Agenda, Change, Process
from tailrace.simulator.devices import Devices
from tailrace.simulator.log import VirtualLog
from tailrace.simulator.passes import passes_s
from tailrace.simulator.samples import Group
from tailrace.simulator.scenario import Scorer

OnScored = Callable[[Group], None]
"""Called with each group that has been scored."""


class SimulatedScorer(Protocol):
    """A model that scores."""

    def score(self, group: Group) -> None:
        """Score a group."""
        ...


class SeparatedScorer:
    """A reference with devices of its own."""

    def __init__(self, agenda: Agenda, kind: Scorer, log: VirtualLog, budget: int, on_scored: OnScored) -> None:
        """`budget`: tokens of a micro-batch."""
        self._agenda = agenda
        self._times = kind.times
        self._log = log
        self._budget = budget
        self._on_scored = on_scored
        self._free = [(0.0, worker) for worker in range(kind.workers)]
        """When each worker is free."""

    def score(self, group: Group) -> None:
        """See `SimulatedScorer`."""
        free, worker = self._free[0]
        start = max(self._agenda.now, free)
        end = start + sum(map(self._times.score_s, plan_micro_batches(group.lengths, self._budget)))
        heapreplace(self._free, (end, worker))
        self._agenda.at(end, lambda: self._scored(group, start, worker))

    def _scored(self, group: Group, start: float, worker: int) -> None:
        tell_reference(self._log, [group], start, worker=f"reference-{worker}")
        self._on_scored(group)


class SharingScorer:
    """A scorer on devices that others have, too. Its workers share each claim."""

    def __init__(
        self,
        agenda: Agenda,
        kind: Scorer,
        tell: Callable[[Sequence[Group], float], None],
        budget: int,
        on_scored: OnScored,
        *,
        devices: Devices,
        most_groups: int,
        activity: Activity,
        phase: Work,
    ) -> None:
        """`tell`: called with each claim that was scored, and its start. `budget`: tokens of a micro-batch.

        `most_groups`: those of a claim. `activity`: of the worker that scores, which is in `phase` meanwhile.
        """
        self._agenda = agenda
        self._kind = kind
        self._tell = tell
        self._budget = budget
        self._on_scored = on_scored
        self._devices = devices
        self._most = most_groups
        self._activity = activity
        self._phase = phase
        self._ready: list[Group] = []
        self._arrived = Change(agenda)
        agenda.start(self._serve())

    def score(self, group: Group) -> None:
        """See `SimulatedScorer`."""
        self._ready.append(group)
        self._arrived.tell()

    def _serve(self) -> Process:
        while True:
            self._activity.enter("data")
            while not self._ready:
                yield self._arrived
            self._activity.leave("data")
            claim, self._ready = self._ready[: self._most], self._ready[self._most :]
            yield from self._devices.take()
            start = self._agenda.now
            self._activity.enter(self._phase)
            yield self._score_s(claim)
            self._activity.leave(self._phase)
            self._devices.leave()
            self._tell(claim, start)
            for group in claim:
                self._on_scored(group)

    def _score_s(self, groups: Sequence[Group]) -> float:
        kind, samples = self._kind, [one for group in groups for one in group.lengths]
        return passes_s(kind.times.score_s, samples, self._budget, ranks=kind.workers, stages=kind.stages)


def tell_reference(log: VirtualLog, groups: Sequence[Group], start: float, **fields: Any) -> None:
    """Tell of a claim that a reference has scored, with the weights of the beginning."""
    _tell(log, EventKind.REFERENCE, groups, start, version=0, **fields)


def tell_values(log: VirtualLog, groups: Sequence[Group], start: float) -> None:
    """Tell of a claim that a critic has scored."""
    _tell(log, "values", groups, start)


def _tell(log: VirtualLog, task: str, groups: Sequence[Group], start: float, **fields: Any) -> None:
    """Tell of a claim as `tasks.scoring` does: in the trainer's row."""
    samples = sum(len(group.responses) for group in groups)
    log.emit(
        Event(
            task=task,
            actor="trainer",
            start=start,
            end=log.now(),
            step=groups[0].step,
            samples=samples,
            **fields,
        )
    )
