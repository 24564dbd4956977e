"""Predicts how long an engine takes until all its sequences are done.

Between two ends of sequences a replica decodes the same batch, whose contexts grow by a token a step. So the steps
between are counted at once, with the latency of the middle one.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tailrace.planning.latency import StepTimes, rms

_ROUNDING = 1e-6
"""Part of a step that seconds divided by seconds may lack of a whole number of steps."""

Work = tuple[int, int]
"""A sequence: its present tokens, which are the context of its next step, and the tokens that it will still make."""


def drain_s(
    predictor: StepTimes, tp: int, replicas: Sequence[Sequence[Work]], waiting: Sequence[Work], *, slots: int
) -> float:
    """Seconds until all sequences have ended; see `drain`."""
    return drain(predictor, tp, replicas, waiting, slots=slots)[-1].seconds


class Drained(NamedTuple):
    """The state of an engine after some time."""

    seconds: float
    replicas: list[list[Work]]
    waiting: list[Work]

    @property
    def unfinished(self) -> int:
        """Number of unfinished sequences."""
        return sum(map(len, self.replicas)) + len(self.waiting)


def drain(
    predictor: StepTimes,
    tp: int,
    replicas: Sequence[Sequence[Work]],
    waiting: Sequence[Work],
    *,
    slots: int,
    stops: Collection[int] = (),
) -> list[Drained]:
    """Simulate the engine until all sequences have ended.

    Replicas run at the same time, and slow each other down. A sequence that ends gives its place to the next that
    waits. That one's tokens are prefilled while the replica's other sequences stand still. The cache is assumed to have
    room.

    Args:
        replicas: the running sequences of each.
        waiting: in the order in which they start, on any replica that has a place.
        slots: the most sequences that a replica decodes together. Further ones of a replica wait before all others,
            and are prefilled again.
        stops: numbers of unfinished sequences, below the present one.

    Returns:
        The state whenever the number has come down to one or several of `stops`, and at last when all have ended.
    """
    queue = deque(work for running in replicas for work in running[slots:])
    queue.extend(waiting)
    simulated = [_Replica(predictor, tp, running[:slots]) for running in replicas]
    _fill(simulated, queue, slots)
    active = [replica for replica in simulated if replica.size]
    for replica in active:
        replica.begin(len(active))
    unfinished = sum(replica.size for replica in active) + len(queue)
    ahead = sorted(stops)
    seen: list[Drained] = []
    now = 0.0
    while active:
        replica = min(active, key=_ends_at)
        now = replica.ends_at
        unfinished -= replica.end_first()
        if ahead and 0 < unfinished <= ahead[-1]:
            seen.append(_state(simulated, queue, now))
            ahead = [stop for stop in ahead if stop < unfinished]
        replica.start([queue.popleft() for _ in range(min(slots - replica.size, len(queue)))])
        if replica.size:
            replica.begin(len(active))
            continue
        active.remove(replica)
        for other in active:
            other.advance(now)
            other.begin(len(active))
    return [*seen, _state(simulated, queue, now)]


def _state(replicas: Sequence["_Replica"], queue: Collection[Work], now: float) -> Drained:
    for replica in replicas:
        if replica.size:
            replica.advance(now)
    return Drained(now, [replica.works() for replica in replicas], list(queue))


class _Replica:
    """A replica at `clock`, which runs to the next end of one of its sequences."""

    def __init__(self, predictor: StepTimes, tp: int, running: Iterable[Work]) -> None:
        self.ends_at = math.inf
        """The time at which the next of its sequences ends."""
        self._predictor = predictor
        self._tp = tp
        self._ends = [(remaining, context + remaining) for context, remaining in running]
        """A heap: the step after which each sequence ends, and its tokens then."""
        heapify(self._ends)
        self._tokens = float(sum(tokens - remaining for remaining, tokens in self._ends))
        """T, the context tokens of all sequences, at `_step`."""
        self._step = 0.0
        self._clock = 0.0
        self._step_s = 0.0

    @property
    def size(self) -> int:
        """B, the number of sequences."""
        return len(self._ends)

    def start(self, joining: Sequence[Work]) -> None:
        """Prefill sequences that join between two steps."""
        if not joining:
            return
        contexts = [context for context, _ in joining]
        self._clock += self._predictor.prefill_s(self._tp, len(joining), rms(contexts))
        self._tokens += sum(contexts)
        for context, remaining in joining:
            heappush(self._ends, (int(self._step) + remaining, context + remaining))

    def begin(self, active: int) -> None:
        """Compute the next end, with `active` replicas at work from `clock` on."""
        steps = self._ends[0][0] - self._step
        size = len(self._ends)
        middle = self._tokens + size * (steps - 1) / 2
        self._step_s = self._predictor.step_s(self._tp, size, middle, active)
        self.ends_at = self._clock + steps * self._step_s

    def advance(self, now: float) -> None:
        """Advance to `now`, which is before `ends_at`; a step may be half done."""
        if now > self._clock and self._step_s > 0:  # otherwise it still prefills
            steps = min((now - self._clock) / self._step_s, self._ends[0][0] - self._step)
            self._clock = now
            self._step += steps
            self._tokens += steps * len(self._ends)

    def works(self) -> list[Work]:
        """The unfinished sequences, as between two steps."""
        left = ((tokens, max(1, math.ceil(end - self._step - _ROUNDING))) for end, tokens in self._ends)
        return [(tokens - remaining, remaining) for tokens, remaining in left]

    def end_first(self) -> int:
        """Advance to the next end and drop all sequences that end with that step. Returns their number."""
        end = self._ends[0][0]
        self._tokens += (end - self._step) * len(self._ends)
        self._step, self._clock = end, self.ends_at
        before = len(self._ends)
        while self._ends and self._ends[0][0] <= end:
            self._tokens -= heappop(self._ends)[1]
        return before - len(self._ends)


def _fill(replicas: Sequence[_Replica], queue: deque[Work], slots: int) -> None:
    """Give waiting sequences to the replicas with the fewest, while there are places."""
    joining: list[list[Work]] = [[] for _ in replicas]
    sizes = [replica.size for replica in replicas]
    while queue and min(sizes) < slots:
        index = sizes.index(min(sizes))
        joining[index].append(queue.popleft())
        sizes[index] += 1
    for replica, works in zip(replicas, joining, strict=True):
        replica.start(works)


def _ends_at(replica: _Replica) -> float:
    return replica.ends_at
