"""Virtual time for engines with real ranks: their steps and switches take what a table says.

The ranks compute every token and exchange weights and caches. Only the clock by which the engine measures them stands
still meanwhile, and then goes on by as much as the table says. Lanes end their steps in the order of that clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tailrace.engine.core import EngineCore
from tailrace.engine.lane import Lane
from tailrace.engine.ranks.base import Replica
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.switch import SwitchExecutor
from tailrace.engine.scheduling.step import StepInput, StepOutput
from tailrace.planning.tp_profile import SwitchCost
from tailrace.planning.tp_verdict import SwitchReport
from tailrace.types import Sample


class TableTime:
    """Stands in for the module `time` where an engine measures steps and switches."""

    def __init__(self, step_s: Callable[[int, int], float], switch: SwitchCost) -> None:
        """Begin at 0.

        Args:
            step_s: Seconds of a step of a replica, by TP and the sequences in it, whether they decode or begin.
            switch: The cost of every switch, whatever its degrees. Keys and values take what their bytes say.
        """
        self.now = 0.0
        self._step_s = step_s
        self._switch = switch
        self._ends: dict[Replica, float] = {}

    def perf_counter(self) -> float:
        """The seconds so far."""
        return self.now

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let all engines that live now or later go by this clock."""
        start, finish, move, complete = (
            ProcessReplica.start,
            ProcessReplica.finish,
            SwitchExecutor.move,
            EngineCore._complete,
        )

        def started(replica: ProcessReplica, step: StepInput) -> None:
            self._ends[replica] = self.now + self._step_s(len(replica.pids), len(step.chunks))
            start(replica, step)

        def finished(replica: ProcessReplica) -> StepOutput:
            output = finish(replica)
            self.now = max(self.now, self._ends.pop(replica))
            return output

        def moved(executor: SwitchExecutor, *args: object, **degrees: int) -> SwitchReport:
            report = move(executor, *args, **degrees)  # type: ignore[arg-type]
            cost, kv_s = self._switch, report.kv_bytes / self._switch.kv_bytes_per_s
            self.now += cost.reshard_s + cost.rest_s + kv_s
            return replace(report, groups_s=0.0, weights_s=cost.reshard_s, kv_s=kv_s)

        def completed(core: EngineCore, lanes: Sequence[Lane]) -> list[Sample]:
            return complete(core, sorted(lanes, key=self._end))

        patch.setattr(ProcessReplica, "start", started)
        patch.setattr(ProcessReplica, "finish", finished)
        patch.setattr(SwitchExecutor, "move", moved)
        patch.setattr(EngineCore, "_complete", completed)
        patch.setattr("tailrace.engine.core.first_done", lambda lanes, **_: self._first_done(lanes))
        patch.setattr("tailrace.engine.lane.time", self)
        patch.setattr("tailrace.engine.arrangement.time", self)

    def _first_done(self, lanes: Sequence[Lane]) -> list[Lane]:
        """The lanes whose steps end next, at the same time."""
        busy = [lane for lane in lanes if lane.busy]
        first = min(map(self._end, busy), default=0.0)
        return [lane for lane in busy if self._end(lane) <= first + 1e-12]

    def _end(self, lane: Lane) -> float:
        return self._ends.get(lane.replica, 0.0)
