"""Decides which running responses go on at another engine, where one has run dry and others have not.

A response that moves is computed again at its new engine, or its cache is sent there. It pays where the engine that is
done last gets done earlier, by more than the prediction may be wrong. What has not begun moves for nothing: its place
is decided anew (`Policy.place`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tailrace.planning.dispatch.base import EngineState
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
    running = [dict(enumerate(engine.running)) for engine in engines]
    arrived: list[float] = [0.0] * len(engines)  # seconds that engines stand still for what has come
    taken = [engine_s(engine, []) for engine in engines]
    chosen: list[Move] = []
    while len(chosen) < most:
        source = max(range(len(engines)), key=taken.__getitem__)
        target = min(range(len(engines)), key=taken.__getitem__)
        if len(running[target]) >= engines[target].slots * engines[target].replicas:
            break
        found: tuple[float, int, float, float, float] | None = None
        for sequence in _candidates(running[source]):
            work = running[source][sequence]
            cost = move_s(source, target, work[0])
            left = _with(engines[source], [other for number, other in running[source].items() if number != sequence])
            after = arrived[source] + engine_s(left, [])
            there = arrived[target] + cost + engine_s(_with(engines[target], [*running[target].values(), work]), [])
            if found is None or max(after, there) < found[0]:
                found = max(after, there), sequence, cost, after, there
        if found is None or taken[source] - found[0] < least_gain * taken[source]:
            break
        _, sequence, cost, after, there = found
        # a sequence that has moved has no place of its own at the new engine, and stays there
        work = running[source].pop(sequence)
        running[target][-1 - len(chosen)] = work
        arrived[target] += cost
        before, taken[source], taken[target] = max(taken), after, there
        chosen.append(Move(source=source, sequence=sequence, target=target, seconds=cost, gain_s=before - max(taken)))
    return chosen


def _candidates(running: dict[int, Work]) -> list[int]:
    """The longest and the shortest of the responses that have not moved yet."""
    own = sorted((number for number in running if number >= 0), key=lambda number: running[number][1])
    return own if len(own) <= 2 * _ENDS else own[:_ENDS] + own[-_ENDS:]


def _with(engine: EngineState, running: Sequence[Work]) -> EngineState:
    return replace(engine, running=running)
