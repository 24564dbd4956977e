"""A lane: one replica with its scheduler, and the step that it computes."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

import torch

from tailrace.engine.profile import Profiler, StepTimes
from tailrace.engine.ranks.base import RankDied, Replica
from tailrace.engine.scheduling.scheduler import Scheduler, StepPlan
from tailrace.engine.scheduling.sequence import Sequence as Running
from tailrace.engine.scheduling.step import StepInput
from tailrace.errors import EngineError
from tailrace.host.frames import MOST_BYTES
from tailrace.types import CacheForm, Sample, SequenceCache, WeightVersion

MAX_DEATHS = 3
"""Times in a row that ranks may die without a completed step. Beyond that, the cause is not chance."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step in which every sequence computed its newest token, and nothing else happened."""

    sequences: int
    context_tokens: int
    """Tokens that were cached before, of all sequences together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A step that computed parts of prompts, and may have decoded beside them."""

    tokens: int
    """In chunks of several."""
    sequences: int
    """That decoded beside them."""
    context_tokens: int
    """Cached, of these sequences."""
    seconds: float


class Lane:
    """Schedules steps for a replica and outlives the death of its ranks."""

    def __init__(self, scheduler: Scheduler, replica: Replica, times: StepTimes) -> None:
        self.scheduler = scheduler
        self.replica = replica
        self._times = times
        self._most_blocks = 0
        self.profiler: Profiler | None = None
        """The profiler of steps; None while they are not profiled."""
        self.decoded: Decoded | None = None
        """The step that was completed last; None if it did more than decode."""
        self.prefilled: Prefilled | None = None
        """The step that was completed last; None if it computed no prompt."""
        self._plan: StepPlan | None = None
        self._version: WeightVersion = 0
        self._deaths = 0
        self.began = 0.0
        """The time when the last step began; see `time.perf_counter`."""
        self._schedule_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._plan is not None

    @property
    def has_work(self) -> bool:
        """Whether a step is under way, or another would do anything."""
        return self.busy or bool(self.scheduler.running or self.scheduler.waiting)

    def take_most_blocks(self) -> int:
        """Return the most blocks that sequences held at once, in the steps since the last call."""
        most, self._most_blocks = self._most_blocks, self.scheduler.blocks.used
        return most

    def begin(self, version: WeightVersion) -> None:
        """Start a step with weights of `version`, unless one is under way or there is nothing to do."""
        if self.busy or not self.has_work:
            return
        self.began = time.perf_counter()
        plan = self.scheduler.schedule()
        self._schedule_s = time.perf_counter() - self.began
        self._most_blocks = max(self._most_blocks, self.scheduler.blocks.used)
        try:
            for blocks, data in plan.arrivals:
                self.replica.write_cache(blocks, data)
            self.replica.start(plan.input)
        except RankDied as death:
            self.restart(death)
        else:
            self._plan, self._version = plan, version

    def complete(self) -> list[Sample]:
        """Wait for the step under way, if there is one. Return the samples that it finished.

        Raises:
            EngineError: the step failed, or ranks have died too often.
        """
        self.decoded = self.prefilled = None
        if self._plan is None:
            return []
        plan, self._plan = self._plan, None
        try:
            output = self.replica.finish()
        except RankDied as death:
            self.restart(death)
            return []
        self._deaths = 0
        self.scheduler.counts.steps += 1
        computed = time.perf_counter()
        samples = self.scheduler.complete(plan, output, self._version)
        ended = time.perf_counter()
        self.decoded = None if plan.arrivals else _decoded(plan.input, ended - self.began)
        self.prefilled = _prefilled(plan.input, ended - self.began)
        schedule_s = self._schedule_s + ended - computed
        self._times.add(plan.input, output.seconds, schedule_s=schedule_s)
        if self.profiler is not None:
            self.profiler.add(plan.input, output.seconds, schedule_s=schedule_s, wall_s=ended - self.began)
        return samples

    def withdraw(self, request_ids: Collection[int], form: CacheForm, version: WeightVersion) -> list[Sample]:
        """Finish these requests with what they have, keys and values included. No step may be under way.

        Args:
            request_ids: unknown ones are ignored.
            form: that of the caches.
            version: that of the weights.

        Raises:
            EngineError: ranks have died too often.
        """
        assert not self.busy, "caches are read between two steps"
        caches = {
            sequence.request.request_id: self._cache_of(sequence, form, version)
            for sequence in self.scheduler.sequences
            if sequence.request.request_id in request_ids
        }
        samples = self.scheduler.abort(request_ids)
        return [replace(sample, cache=caches[sample.request_id]) for sample in samples]

    def _cache_of(self, sequence: Running, form: CacheForm, version: WeightVersion) -> SequenceCache | None:
        if not sequence.cached:
            return sequence.came
        if sequence.cached * form.token_bytes > MOST_BYTES:
            return None  # it is computed again: a rank sends its part in one message
        blocks, is_mixed = sequence.blocks[: self.scheduler.blocks.blocks_for(sequence.cached)], sequence.tip is None
        try:
            data = self.replica.read_cache(blocks)
        except RankDied as death:
            self.restart(death)
            return None
        return SequenceCache(form=form, tokens=sequence.cached, version=version, is_mixed=is_mixed, data=data)

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Begin to replace the weights. No step may be under way, and none starts before `loaded`."""
        assert not self.busy, "weights change between two steps"
        try:
            self.replica.load(named)
        except RankDied as death:
            self.restart(death)

    def loaded(self, *, recompute: bool) -> None:
        """Wait for the new weights. See `EngineCore.load_weights`."""
        try:
            self.replica.settle()
        except RankDied as death:
            self.restart(death)
        self.scheduler.new_weights(recompute=recompute)

    def restart(self, death: RankDied) -> None:
        """Replace the ranks; unfinished sequences keep their tokens and are computed again.

        Raises:
            EngineError: the new ranks die, too, again and again.
        """
        self.scheduler.restart()
        alive = False
        while not alive:
            self._deaths += 1
            if self._deaths > MAX_DEATHS:
                raise EngineError(f"{death}; ranks died {self._deaths} times in a row without a step done") from death
            try:
                self.replica.restart()
                alive = True
            except RankDied as another:
                death = another
        self.scheduler.counts.restarts += 1


def _decoded(step: StepInput, seconds: float) -> Decoded | None:
    if step.copies or any(len(chunk.tokens) > 1 for chunk in step.chunks):
        return None
    return Decoded(len(step.chunks), sum(chunk.start for chunk in step.chunks), seconds)


def _prefilled(step: StepInput, seconds: float) -> Prefilled | None:
    tokens = sum(len(chunk.tokens) for chunk in step.chunks if len(chunk.tokens) > 1)
    decoded = [chunk.start for chunk in step.chunks if len(chunk.tokens) == 1]
    return Prefilled(tokens, len(decoded), sum(decoded), seconds) if tokens else None


def first_done(lanes: Sequence[Lane], *, timeout_s: float) -> list[Lane]:
    """Wait until a lane's step is done, a rank has died or a step is overdue. Return the lanes to complete.

    Completing a step that began `timeout_s` ago or more raises the error of its replica.
    """
    busy = [lane for lane in lanes if lane.busy]
    if len(busy) < 2:
        return busy
    waitables = {descriptor: lane for lane in busy for descriptor in lane.replica.waitables()}
    limits = {lane: lane.began + timeout_s for lane in busy}
    ready = wait(list(waitables), max(0.0, min(limits.values()) - time.perf_counter()))
    done = {waitables[descriptor] for descriptor in ready if isinstance(descriptor, int)}
    now = time.perf_counter()
    return [lane for lane in busy if lane in done or limits[lane] <= now]
