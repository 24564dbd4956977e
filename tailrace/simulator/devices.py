"""Devices that several workers have in turns: all of a run in one process, or those of a critic.

Engines compute while nobody else does. Trainer, critic and reference wait for each other, in the order of asking, and
for the steps under way. Between two of their computations, engines make a step.
"""

from collections.abc import Sequence

from tailrace.simulator.agenda import Agenda, Process, Turns
from tailrace.simulator.engines import SimulatedEngine


class Devices:
    """Those of all engines, or of none."""

    def __init__(self, agenda: Agenda, engines: Sequence[SimulatedEngine] = ()) -> None:
        self._turns = Turns(agenda)
        self._engines = engines

    def take(self) -> Process:
        """Wait for a turn, and until engines stand still."""
        yield from self._turns.take()
        yield max((engine.pause() for engine in self._engines), default=0.0)

    def leave(self) -> None:
        """Let the next one have its turn."""
        for engine in self._engines:
            engine.resume()
        self._turns.leave()
