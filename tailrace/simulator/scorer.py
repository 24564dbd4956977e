"""A reference in simulated time: the next free one of its workers takes what is there."""

from collections.abc import Callable
from heapq import heapreplace

from tailrace.events import Event
from tailrace.planning.packing import plan_micro_batches
from tailrace.registers.events import EventKind
from tailrace.simulator.agenda import Agenda
from tailrace.simulator.log import VirtualLog
from tailrace.simulator.samples import Group
from tailrace.simulator.scenario import Scorer


class SimulatedScorer:
    """Scores groups."""

    def __init__(
        self, agenda: Agenda, kind: Scorer, log: VirtualLog, budget: int, on_scored: Callable[[Group], None]
    ) -> None:
        """`budget`: tokens of a micro-batch. `on_scored`: called with each group that has been scored."""
        self._agenda = agenda
        self._times = kind.times
        self._log = log
        self._budget = budget
        self._on_scored = on_scored
        self._free = [0.0] * kind.workers

    def score(self, group: Group) -> None:
        """Score a group."""
        start = max(self._agenda.now, self._free[0])
        end = start + sum(map(self._times.score_s, plan_micro_batches(group.lengths, self._budget)))
        heapreplace(self._free, end)
        self._agenda.at(end, lambda: self._scored(group, start))

    def _scored(self, group: Group, start: float) -> None:
        self._log.emit(
            Event(task=EventKind.REFERENCE, actor="reference", start=start, end=self._agenda.now, step=group.step)
        )
        self._on_scored(group)
