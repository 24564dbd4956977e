"""Decides which running responses go on at another engine, where one has run dry and others have not.

A response that moves is computed again at its new engine, or its keys and values are sent there: whichever is cheaper.
Computing takes as long as the new engine's prompts have taken. Sending takes as long as the bytes that each of the two
engines was sent before. It pays where the engine that is done last gets done earlier, by more than the prediction may
be wrong. What has not begun moves for nothing: its place is decided anew (`Policy.place`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tailrace.planning.dispatch.base import Degree, EngineState
from tailrace.planning.dispatch.seconds import engine_s
from tailrace.planning.drain import Work
from tailrace.types import CacheForm

_ENDS = 4
"""Of the responses of an engine, so many of the longest and as many of the shortest are tried."""

EVERY_S = 0.5
"""Seconds between two choices of responses to move."""
MOST_BYTES = 2**30
"""Of keys and values that move at a time. They pass through the memory of the run's process."""
_NEAR_BYTE_S = 1 / 100e6
"""Seconds of a byte between an engine and the run's process, until they are measured."""
_FAR_BYTE_S = 1 / 10e6
"""The same where the two engines are in different datacentres."""
_LEAST_BYTES = 2**20
"""What is smaller tells nothing of the rate."""
_FORGET = 0.9
"""The weight that what was sent keeps with each further time."""

Way = Literal["recompute", "transfer"]
"""How a response moves: its tokens are computed again, or its keys and values are sent."""
MoveSeconds = Callable[[int, int, int], float]
"""Seconds that a sequence takes to move, by the places of its engine and of the new one, and its present tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A response that goes on elsewhere."""

    source: int
    """The place of its engine."""
    sequence: int
    """Its place in `EngineState.running` of that engine."""
    target: int
    way: Way
    seconds: float
    """That it takes to move."""
    gain_s: float
    """By which all are done earlier, with the moves before it."""


def recompute_s(engines: Sequence[EngineState]) -> MoveSeconds:
    """The seconds to compute the tokens of a sequence again at its new engine."""

    def seconds(source: int, target: int, tokens: int) -> float:
        return engines[target].times.prefill_s(engines[target].tp, 1, tokens)

    return seconds


class ObservedLink:
    """Learns how long a byte takes to an engine."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def sent(self, size: int, seconds: float) -> None:
        """Take in that so many bytes were sent."""
        if size >= _LEAST_BYTES:
            self._bytes = self._bytes * _FORGET + size
            self._seconds = self._seconds * _FORGET + seconds

    @property
    def byte_s(self) -> float | None:
        """Seconds of a byte; None where none was sent yet."""
        return self._seconds / self._bytes if self._bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """An engine to which, or from which, keys and values may be sent."""

    form: CacheForm | None
    """See `Engine.cache_form`."""
    datacentre: str = ""
    byte_s: float | None = None
    """See `ObservedLink`. It counts in both directions."""


def transfer_s(ends: Sequence[LinkEnd]) -> MoveSeconds:
    """The seconds to send the keys and values of a sequence; endless where they would not fit."""

    def seconds(source: int, target: int, tokens: int) -> float:
        one, other = ends[source], ends[target]
        if one.form is None or one.form != other.form or (size := tokens * one.form.token_bytes) > MOST_BYTES:
            return math.inf
        unknown = _NEAR_BYTE_S if one.datacentre == other.datacentre else _FAR_BYTE_S
        return size * sum(unknown if end.byte_s is None else end.byte_s for end in (one, other))

    return seconds


def at_once(moves: Iterable[Move], engines: Sequence[EngineState], ends: Sequence[LinkEnd]) -> Iterator[Move]:
    """Yield the first moves, which together send `MOST_BYTES` at most. The others may be chosen next time."""
    size = 0
    for move in moves:
        form, (tokens, _) = ends[move.source].form, engines[move.source].running[move.sequence]
        size += tokens * form.token_bytes if move.way == "transfer" and form is not None else 0
        if size > MOST_BYTES:
            return
        yield move


def moves(
    engines: Sequence[EngineState], ways: Mapping[Way, MoveSeconds], *, least_gain: float = 0.05, most: int = 16
) -> list[Move]:
    """Choose moves of running responses, the first ones first.

    Args:
        engines: none has responses that wait.
        ways: the cheapest one is taken, of equal ones the first.
        least_gain: the part of the seconds until all are done that each move has to save.
        most: moves.
    """
    now = [_Engine(engine, list(range(len(engine.running))), _ends_s(engine)) for engine in engines]
    chosen: list[Move] = []
    while len(chosen) < most:
        source = max(range(len(now)), key=lambda index: now[index].seconds)
        target = min(range(len(now)), key=lambda index: now[index].seconds)
        if not now[target].state.free:
            break
        trials = [
            _trial(
                now[source], now[target], place, *_cheapest(ways, source, target, now[source].state.running[place][0])
            )
            for place in _candidates(now[source])
        ]
        best = min(trials, key=lambda trial: trial.latest, default=None)
        if best is None or now[source].seconds - best.latest < least_gain * now[source].seconds:
            break
        before, sequence = now[source].seconds, now[source].own[best.place]
        now[source], now[target] = best.source, best.target
        gain_s = before - max(engine.seconds for engine in now)
        chosen.append(
            Move(source=source, sequence=sequence, target=target, way=best.way, seconds=best.move_s, gain_s=gain_s)
        )
    return chosen


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine after the moves so far."""

    state: EngineState
    own: list[int]
    """The places that its own responses had before. They are the first ones of `state.running`; others have come."""
    seconds: float
    """Until it is done, those included in which it stands still for what has come."""
    still_s: float = 0.0
    """The latter."""


class _Trial(NamedTuple):
    """One more move."""

    place: int
    """Of the response in what its engine runs."""
    way: Way
    move_s: float
    source: _Engine
    target: _Engine

    @property
    def latest(self) -> float:
        """Seconds until both engines are done."""
        return max(self.source.seconds, self.target.seconds)


def _cheapest(ways: Mapping[Way, MoveSeconds], source: int, target: int, tokens: int) -> tuple[Way, float]:
    seconds = {way: move_s(source, target, tokens) for way, move_s in ways.items()}
    way = min(seconds, key=lambda each: seconds[each])
    return way, seconds[way]


def _trial(source: _Engine, target: _Engine, place: int, way: Way, move_s: float) -> _Trial:
    """Move the response at a place."""
    running, own = list(source.state.running), list(source.own)
    work, _ = running.pop(place), own.pop(place)
    left, joined = _with(source.state, running), _with(target.state, [*target.state.running, work])
    still_s = target.still_s + move_s
    return _Trial(
        place,
        way,
        move_s,
        _Engine(left, own, source.still_s + _ends_s(left), source.still_s),
        _Engine(joined, target.own, still_s + _ends_s(joined), still_s),
    )


def _ends_s(engine: EngineState) -> float:
    """Seconds until an engine is done, under its best TP degree: the one that it has, or another one from now on."""
    if not engine.running:
        return 0.0
    changed = (degree.switch_s + engine_s(_changed(engine, degree), []) for degree in engine.degrees)
    return min([engine_s(engine, []), *changed])


def _changed(engine: EngineState, degree: Degree) -> EngineState:
    """The engine after a change of its degree."""
    return replace(
        engine,
        times=degree.times,
        tp=degree.tp,
        replicas=degree.replicas,
        slots=degree.slots,
        cache_tokens=degree.cache_tokens,
    )


def _candidates(engine: _Engine) -> list[int]:
    """The places of the longest and the shortest of an engine's own responses."""
    own = sorted(range(len(engine.own)), key=lambda place: engine.state.running[place][1])
    return own if len(own) <= 2 * _ENDS else own[:_ENDS] + own[-_ENDS:]


def _with(engine: EngineState, running: Sequence[Work]) -> EngineState:
    return replace(engine, running=running)
