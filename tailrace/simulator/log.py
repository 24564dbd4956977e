"""A run's events in simulated time."""

from tailrace.events import EventLog, Sink
from tailrace.simulator.agenda import Agenda


class VirtualLog(EventLog):
    """A log whose clock is an agenda's."""

    def __init__(self, agenda: Agenda, sinks: tuple[Sink, ...], worker: str = "") -> None:
        super().__init__(sinks=sinks, worker=worker, origin=0.0)
        self._agenda = agenda

    def now(self) -> float:
        """See `EventLog`."""
        return self._agenda.now

    def at(self, perf_counter: float) -> float:
        """See `EventLog`; here all clocks are the agenda's."""
        return perf_counter
