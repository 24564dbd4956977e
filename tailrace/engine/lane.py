"""One replica with its scheduler, and the step that it computes."""

from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait

import torch

from tailrace.engine.ranks.base import RankDied, Replica
from tailrace.engine.scheduler import Scheduler, StepPlan
from tailrace.errors import EngineError
from tailrace.types import Sample, WeightVersion

MAX_DEATHS = 3
"""Times in a row that ranks may die without a step done: what kills them is not chance then."""


class Lane:
    """Schedules steps for a replica and outlives the death of its ranks."""

    def __init__(self, scheduler: Scheduler, replica: Replica) -> None:
        self.scheduler = scheduler
        self.replica = replica
        self.steps = 0
        self.restarts = 0
        self._plan: StepPlan | None = None
        self._version: WeightVersion = 0
        self._deaths = 0

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._plan is not None

    def begin(self, version: WeightVersion) -> None:
        """Start a step with weights of `version`, unless one is under way or there is nothing to do."""
        if self.busy or not self.scheduler.has_work:
            return
        plan = self.scheduler.schedule()
        try:
            self.replica.start(plan.input)
        except RankDied as death:
            self._revive(death)
        else:
            self._plan, self._version = plan, version

    def complete(self) -> list[Sample]:
        """Wait for the step under way, if there is one; the samples that it finished.

        Raises:
            EngineError: the step failed, or ranks have died too often.
        """
        if self._plan is None:
            return []
        plan, self._plan = self._plan, None
        try:
            output = self.replica.finish()
        except RankDied as death:
            self._revive(death)
            return []
        self._deaths = 0
        self.steps += 1
        return self.scheduler.complete(plan, output, self._version)

    def load(self, named: Mapping[str, torch.Tensor], *, recompute: bool) -> None:
        """Replace the weights; no step is under way. See `EngineCore.load_weights`."""
        assert not self.busy, "weights change between two steps"
        try:
            self.replica.load(named)
        except RankDied as death:
            self._revive(death)
        self.scheduler.new_weights(recompute=recompute)

    def _revive(self, death: RankDied) -> None:
        """Replace the ranks; unfinished sequences keep their tokens and are computed again."""
        self.scheduler.restart()
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            raise EngineError(f"{death}; ranks died {self._deaths} times in a row without a step done") from death
        self.replica.restart()
        self.restarts += 1


def first_done(lanes: Sequence[Lane], *, timeout_s: float) -> list[Lane]:
    """Wait until a lane's step is done, or a rank has died; the lanes to complete.

    All that compute after `timeout_s`: to complete a replica that is too slow raises what is wrong with it.
    """
    busy = [lane for lane in lanes if lane.busy]
    waitables = {descriptor: lane for lane in busy for descriptor in lane.replica.waitables()}
    if len(busy) < 2 or not waitables:
        return busy
    ready = {waitables[descriptor] for descriptor in wait(list(waitables), timeout_s) if isinstance(descriptor, int)}
    return [lane for lane in busy if lane in ready] or busy
