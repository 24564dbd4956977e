"""Decides which running responses go on at another engine, where one has run dry and others have not.

A response that moves is computed again at its new engine, or its cache is sent there. It pays where the engine that is
done last gets done earlier, by more than the prediction may be wrong. What has not begun moves for nothing: its place
is decided anew (`Policy.place`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tailrace.planning.dispatch.base import Degree, EngineState
from tailrace.planning.dispatch.seconds import engine_s
from tailrace.planning.drain import Work

_ENDS = 4
"""Of the responses of an engine, so many of the longest and as many of the shortest are tried."""

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
    seconds: float
    """That it takes to move."""
    gain_s: float
    """By which all are done earlier, with the moves before it."""


def recompute_s(engines: Sequence[EngineState]) -> MoveSeconds:
    """The seconds to compute the tokens of a sequence again at its new engine."""

    def seconds(source: int, target: int, tokens: int) -> float:
        return engines[target].times.prefill_s(engines[target].tp, 1, tokens)

    return seconds


def moves(
    engines: Sequence[EngineState], move_s: MoveSeconds, *, least_gain: float = 0.05, most: int = 16
) -> list[Move]:
    """Choose moves of running responses, the first ones first.

    Args:
        engines: none has responses that wait.
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
            _trial(now[source], now[target], place, move_s(source, target, now[source].state.running[place][0]))
            for place in _candidates(now[source])
        ]
        best = min(trials, key=lambda trial: trial.latest, default=None)
        if best is None or now[source].seconds - best.latest < least_gain * now[source].seconds:
            break
        before, sequence = now[source].seconds, now[source].own[best.place]
        now[source], now[target] = best.source, best.target
        gain_s = before - max(engine.seconds for engine in now)
        chosen.append(Move(source=source, sequence=sequence, target=target, seconds=best.move_s, gain_s=gain_s))
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
    move_s: float
    source: _Engine
    target: _Engine

    @property
    def latest(self) -> float:
        """Seconds until both engines are done."""
        return max(self.source.seconds, self.target.seconds)


def _trial(source: _Engine, target: _Engine, place: int, move_s: float) -> _Trial:
    """Move the response at a place."""
    running, own = list(source.state.running), list(source.own)
    work, _ = running.pop(place), own.pop(place)
    left, joined = _with(source.state, running), _with(target.state, [*target.state.running, work])
    still_s = target.still_s + move_s
    return _Trial(
        place,
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
