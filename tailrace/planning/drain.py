"""How long an engine takes until everything is done that it has.

Between two ends of sequences a replica decodes the same batch, whose contexts grow by a token a step. So the steps
between are counted at once, with the latency in their middle.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tailrace.planning.latency import StepTimes, rms

_ROUNDING = 1e-6
"""Of a step: what seconds divided by seconds may lack of a whole number of steps."""

Work = tuple[int, int]
"""A sequence: its tokens now, which are the context of its next step, and the tokens that it will still make."""


def drain_s(
    predictor: StepTimes, tp: int, replicas: Sequence[Sequence[Work]], waiting: Sequence[Work], *, slots: int
) -> float:
    """Seconds until all sequences have ended; see `drain`."""
    return drain(predictor, tp, replicas, waiting, slots=slots)[-1].seconds


class Drained(NamedTuple):
    """An engine after some time."""

    seconds: float
    replicas: list[list[Work]]
    waiting: list[Work]

    @property
    def unfinished(self) -> int:
        """Sequences."""
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
    """Let all sequences end.

    Replicas run beside each other, and slow each other down while they do. A sequence that ends leaves its place to the
    next that waits, whose tokens are prefilled while the replica's others stand still. The cache is taken to have room.

    Args:
        replicas: what runs on each.
        waiting: in the order in which they start, on whichever replica has a place.
        slots: sequences that a replica decodes together at most. What a replica has beyond that waits before all
            others, and is prefilled again.
        stops: numbers of unfinished sequences, below that of now.

    Returns:
        The engine whenever it has come down to one of `stops` or several, and at last when all have ended.
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
    """One replica at `clock`, with the steps until its next end under way."""

    def __init__(self, predictor: StepTimes, tp: int, running: Iterable[Work]) -> None:
        self.ends_at = math.inf
        """When the next of its sequences ends."""
        self._predictor = predictor
        self._tp = tp
        self._ends = [(remaining, context + remaining) for context, remaining in running]
        """A heap: the step after which each sequence ends, and its tokens then."""
        heapify(self._ends)
        self._tokens = float(sum(tokens - remaining for remaining, tokens in self._ends))
        """T at `_step`."""
        self._step = 0.0
        self._clock = 0.0
        self._step_s = 0.0

    @property
    def size(self) -> int:
        """B."""
        return len(self._ends)

    def start(self, joining: Sequence[Work]) -> None:
        """Prefill these, between two steps."""
        if not joining:
            return
        contexts = [context for context, _ in joining]
        self._clock += self._predictor.prefill_s(self._tp, len(joining), rms(contexts))
        self._tokens += sum(contexts)
        for context, remaining in joining:
            heappush(self._ends, (int(self._step) + remaining, context + remaining))

    def begin(self, active: int) -> None:
        """Find the next end, with `active` replicas at work from `clock` on."""
        steps = self._ends[0][0] - self._step
        size = len(self._ends)
        middle = self._tokens + size * (steps - 1) / 2
        self._step_s = self._predictor.step_s(self._tp, size, middle, active)
        self.ends_at = self._clock + steps * self._step_s

    def advance(self, now: float) -> None:
        """Do what is done until `now`, which is before `ends_at`; a step may be half done."""
        if now > self._clock and self._step_s > 0:  # otherwise it prefills still
            steps = min((now - self._clock) / self._step_s, self._ends[0][0] - self._step)
            self._clock = now
            self._step += steps
            self._tokens += steps * len(self._ends)

    def works(self) -> list[Work]:
        """What it still has, between two steps."""
        left = ((tokens, max(1, math.ceil(end - self._step - _ROUNDING))) for end, tokens in self._ends)
        return [(tokens - remaining, remaining) for tokens, remaining in left]

    def end_first(self) -> int:
        """Go to the next end, and let go of all that end with that step; how many these are."""
        end = self._ends[0][0]
        self._tokens += (end - self._step) * len(self._ends)
        self._step, self._clock = end, self.ends_at
        before = len(self._ends)
        while self._ends and self._ends[0][0] <= end:
            self._tokens -= heappop(self._ends)[1]
        return before - len(self._ends)


def _fill(replicas: Sequence[_Replica], queue: deque[Work], slots: int) -> None:
    """Give what waits to the replicas with the fewest sequences, while there are places."""
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
