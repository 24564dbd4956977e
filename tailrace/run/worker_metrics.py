"""Adds figures of the workers to the events of steps: the shares of their time, and the peaks of their memory."""

from collections import defaultdict

from tailrace.events import Event
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import MEMORY, SHARE
from tailrace.registers.phases import PHASES
from tailrace.report.breakdown import WorkerTime
from tailrace.report.workers import worker_of


class WorkerMetrics:
    """A sink that sums up what workers have told since the step before, and writes it into passing `step` events.

    It comes before the sinks that show steps. Workers other than the trainer tell their time once a second, so the
    figures of a step may lag by that.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._peaks: dict[str, float] = defaultdict(float)

    def __call__(self, event: Event) -> None:
        """Take an event of a worker, or complete one of a step."""
        match event.task:
            case EventKind.BREAKDOWN:
                seconds = self._seconds[worker_of(event)]
                for name, spent in event.metrics.items():
                    seconds[name] += spent
            case EventKind.MEMORY:
                worker = worker_of(event)
                self._peaks[worker] = max(self._peaks[worker], event.metrics["peak"])
            case EventKind.STEP:
                event.metrics |= self._shares()
                event.metrics |= {f"{MEMORY.prefix}{worker}": peak for worker, peak in self._peaks.items()}
                self._begin()

    def _shares(self) -> dict[str, float]:
        times = [WorkerTime(worker, seconds) for worker, seconds in self._seconds.items()]
        shares = {f"{SHARE.prefix}{time.worker}/{phase}": time.share(phase) for time in times for phase in PHASES}
        return {name: share for name, share in shares.items() if share}
