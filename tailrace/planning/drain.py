"""Predicts how long an engine takes until all its sequences are done.

Between two ends of sequences a replica decodes the same batch, whose contexts grow by a token a step. So the steps
between are counted at once, with the latency of the middle one.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from tailrace.planning.latency import StepTimes, alike

_ROUNDING = 1e-6
"""Part of a step that seconds divided by seconds may lack of a whole number of steps."""

Work = tuple[int, int]
"""A sequence: its present tokens, which are the context of its next step, and the tokens that it will still make."""
Held = tuple[Work, int]
"""A sequence, and its present tokens without those of a prompt that it shares with one that ends later."""


def drain_s(
    predictor: StepTimes, tp: int, replicas: Sequence[Sequence[Work]], waiting: Sequence[Work], *, slots: int
) -> float:
    """Seconds until all sequences have ended, where the cache has room for all; see `drain`."""
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
    cache_tokens: float = math.inf,
    stops: Collection[int] = (),
) -> list[Drained]:
    """Simulate the engine until all sequences have ended, where none shares its prompt; see `drain_held`."""
    held = [unshared(running) for running in replicas], unshared(waiting)
    return drain_held(predictor, tp, *held, slots=slots, cache_tokens=cache_tokens, stops=stops)


def unshared(works: Iterable[Work]) -> list[Held]:
    """Sequences that share no prompt."""
    return [(work, work[0]) for work in works]


def drain_held(
    predictor: StepTimes,
    tp: int,
    replicas: Sequence[Sequence[Held]],
    waiting: Sequence[Held],
    *,
    slots: int,
    cache_tokens: float = math.inf,
    stops: Collection[int] = (),
) -> list[Drained]:
    """Simulate the engine until all sequences have ended.

    Replicas run at the same time, and slow each other down: each is costed beside the batches of the others, which it
    looks at anew when these have changed by an eighth. A sequence that ends gives its place to the next that
    waits. That one's tokens are prefilled while the replica's other sequences stand still. Where the cache of a replica
    is full, the sequence that started last there waits before all others, and is prefilled again.

    Args:
        replicas: the running sequences of each.
        waiting: in the order in which they start, on any replica that has a place.
        slots: the most sequences that a replica decodes together. Further ones of a replica wait before all others,
            and are prefilled again.
        cache_tokens: the most tokens that a replica holds, shared prompts once. A single sequence runs on beyond it.
        stops: numbers of unfinished sequences, below the present one.

    Returns:
        The state whenever the number has come down to one or several of `stops`, and at last when all have ended.
    """
    queue: deque[Held] = deque()
    simulated = [_Replica(predictor, tp, slots, cache_tokens) for _ in replicas]
    for replica, running in zip(simulated, replicas, strict=True):
        left = deque(running)
        replica.resume(_joining([replica], left)[0])
        queue.extend(left)
    queue.extend(waiting)
    _fill(simulated, queue, 0.0)
    active = [replica for replica in simulated if replica.size]
    _go_on(active, active, 0.0)
    unfinished = sum(replica.size for replica in active) + len(queue)
    ahead = sorted(stops)
    seen: list[Drained] = []
    now = 0.0
    while active:
        replica = min(active, key=_stops_at)
        now = replica.stops_at
        if replica.is_full:
            queue.appendleft(replica.preempt())
            _fill([other for other in simulated if not other.size], queue, now)
        else:
            unfinished -= replica.end_first()
            if ahead and 0 < unfinished <= ahead[-1]:
                seen.append(_state(simulated, queue, now))
                ahead = [stop for stop in ahead if stop < unfinished]
            _fill([replica], queue, now)
        before, active = len(active), [other for other in simulated if other.size]
        _go_on([replica] if len(active) == before else active, active, now)
    return [*seen, _state(simulated, queue, now)]


def _state(replicas: Sequence["_Replica"], queue: Collection[Held], now: float) -> Drained:
    for replica in replicas:
        if replica.size:
            replica.advance(now)
    return Drained(now, [replica.works() for replica in replicas], [work for work, _ in queue])


class _Replica:
    """A replica at `clock`, which runs until one of its sequences ends or its cache is full."""

    def __init__(self, predictor: StepTimes, tp: int, slots: int, cache_tokens: float) -> None:
        self.stops_at = math.inf
        """The time at which the next of its sequences ends, or its cache is full."""
        self.is_full = False
        """Whether it stops for want of cache."""
        self._predictor = predictor
        self._tp = tp
        self._slots = slots
        self._cache_tokens = cache_tokens
        self._ends: list[tuple[float, int, int, int]] = []
        """A heap: the step after which each sequence ends, its tokens then, its place in the order of starts, and those
        of its tokens that another sequence holds."""
        self._started = 0
        self._tokens = 0.0
        """T, the context tokens of all sequences, at `_step`."""
        self._shared = 0
        """Those of them that other sequences hold."""
        self._step = 0.0
        self._clock = 0.0
        self._step_s = 0.0
        self._others: float | None = None
        self._stop = 0.0
        """The step at `stops_at`."""

    @property
    def size(self) -> int:
        """B, the number of sequences."""
        return len(self._ends)

    def has_room(self, held: int, joining: int, tokens: int) -> bool:
        """Whether there is a place for a sequence that holds `held` tokens, and cache for all to grow by a token,
        beside `joining` others that hold `tokens`."""
        size, needed = self.size + joining, self._tokens - self._shared + tokens + held
        return size < self._slots and (size == 0 or needed + size + 1 <= self._cache_tokens)

    def resume(self, running: Iterable[Held]) -> None:
        """Let sequences run on whose contexts are cached."""
        for (context, remaining), held in running:
            self._tokens += context
            self._shared += context - held
            heappush(self._ends, (int(self._step) + remaining, context + remaining, self._started, context - held))
            self._started += 1

    def start(self, joining: Sequence[Held], now: float) -> None:
        """Prefill sequences that join between two steps, `now` where it has been idle."""
        if not joining:
            return
        if not self._ends:
            self._clock = max(self._clock, now)
        self._clock += self._predictor.prefill_s(self._tp, *alike(held for _, held in joining))
        self.resume(joining)

    def begin(self, active: int, others: float | None) -> None:
        """Compute the next stop, with `active` replicas at work from `clock` on; `others` as in `StepTimes`."""
        self._others = others
        size = len(self._ends)
        end, room = self._ends[0][0], (self._cache_tokens - self._tokens + self._shared) / size
        self.is_full = self._step + room < end and size > 1
        self._stop = self._step + max(0.0, room) if self.is_full else end
        steps = self._stop - self._step
        middle = self._tokens + size * (steps - 1) / 2
        self._step_s = self._predictor.step_s(self._tp, size, middle, active, others)
        self.stops_at = self._clock + steps * self._step_s

    def is_outdated(self, others: float | None) -> bool:
        """Whether the others have changed much since `begin`."""
        before = self._others
        return before is not None and others is not None and 8 * abs(others - before) >= before

    def advance(self, now: float) -> None:
        """Advance to `now`, which is before `stops_at`; a step may be half done."""
        if now > self._clock and self._step_s > 0:  # otherwise it still prefills
            self._go(min((now - self._clock) / self._step_s, self._stop - self._step))
            self._clock = now

    def works(self) -> list[Work]:
        """The unfinished sequences, as between two steps."""
        step = self._step + _ROUNDING
        left = [(tokens, max(1, math.ceil(end - step))) for end, tokens, *_ in self._ends]
        return [(tokens - remaining, remaining) for tokens, remaining in left]

    def end_first(self) -> int:
        """Advance to the next end and drop all sequences that end with that step. Returns their number."""
        end = self._stop
        self._go(end - self._step)
        self._step, self._clock = end, self.stops_at
        before = len(self._ends)
        while self._ends and self._ends[0][0] <= end:
            _, tokens, _, shared = heappop(self._ends)
            self._tokens -= tokens
            self._shared -= shared
        return before - len(self._ends)

    def preempt(self) -> Held:
        """Advance to where the cache is full. Take the sequence away that started last."""
        self._go(self._stop - self._step)
        self._clock = self.stops_at
        last = max(self._ends, key=_place)
        self._ends.remove(last)
        heapify(self._ends)
        end, tokens, _, shared = last
        remaining = max(1, math.ceil(end - self._step - _ROUNDING))
        self._tokens -= tokens - (end - self._step)
        self._shared -= shared
        return (tokens - remaining, remaining), tokens - remaining - shared

    def _go(self, steps: float) -> None:
        self._step += steps
        self._tokens += steps * len(self._ends)


def _go_on(changed: Collection[_Replica], active: Collection[_Replica], now: float) -> None:
    """Let those of the replicas at work run up to another stop that have changed, or beside which much has changed."""
    others, sequences = len(active) - 1, sum(replica.size for replica in active)
    for replica in active:
        beside = (sequences - replica.size) / others if others else None
        if replica in changed or replica.is_outdated(beside):
            replica.advance(now)
            replica.begin(len(active), beside)


def _fill(replicas: Sequence[_Replica], queue: deque[Held], now: float) -> None:
    """Start waiting sequences on these replicas, as long as there is room."""
    if not queue:
        return
    for replica, joining in zip(replicas, _joining(replicas, queue), strict=True):
        replica.start(joining, now)


def _joining(replicas: Sequence[_Replica], queue: deque[Held]) -> list[list[Held]]:
    """Take the first sequences from the queue, each for the replica with the fewest, until that has no room."""
    joining: list[list[Held]] = [[] for _ in replicas]
    sizes, tokens = [replica.size for replica in replicas], [0] * len(replicas)
    while queue and replicas:
        index = sizes.index(min(sizes))
        _, held = queue[0]
        if not replicas[index].has_room(held, len(joining[index]), tokens[index]):
            break
        sizes[index] += 1
        tokens[index] += held
        joining[index].append(queue.popleft())
    return joining


def _stops_at(replica: _Replica) -> float:
    return replica.stops_at


_place = itemgetter(2)
