"""The progress of a run, from its events as they arrive."""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

from tailrace.events import Event
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import TIME, Shown, shown_in
from tailrace.report.text import setting
from tailrace.report.workers import has_engine, worker_of

_LATELY = 10
"""Number of recent activity events that are kept of each worker."""


class Progress:
    """Counts and figures of a run so far. A step that is repeated after a resume counts again."""

    def __init__(self) -> None:
        self.headline = "run"
        self.total_steps = 0
        self.done = 0
        """Steps finished since the start of the run, earlier attempts included."""
        self.metrics: dict[str, list[float]] = {}
        """The finite values of each step metric, in the order of the steps seen here."""
        self.task_seconds: dict[str, float] = {}
        """Seconds that each task took, over all steps seen here."""
        self.held_out: dict[str, list[float]] = {}
        """Rewards and accuracies of the evaluations seen here, as far as they have them."""
        self.phase = "starting"
        self.activities: dict[str, deque[Mapping[str, float]]] = defaultdict(lambda: deque(maxlen=_LATELY))
        """The seconds by state of the newest activity events of each worker."""
        self.queue: Mapping[str, float] = {}
        """The metrics of the newest `queue` event."""
        self.dispatch: Mapping[str, float] = {}
        """The metrics of the newest `dispatch` event, with what has changed since."""
        self.scaled: Event | None = None
        """The newest `scale` event."""
        self.deaths = 0
        """Number of deaths of workers."""
        self.dead: set[str] = set()
        """Workers that have died, including those that were started again."""
        self._step_seconds: list[float] = []
        self._between_steps = 0.0
        self._first_start = 0.0
        self._last_end = 0.0
        self._seen_at: float | None = None
        self._responses = 0

    def add(self, event: Event, *, at: float) -> None:
        """Take an event that arrived at the monotonic time `at`; ignore an unknown one."""
        self._last_end = max(self._last_end, event.end)
        self._seen_at = at
        if event.task == EventKind.RUN:
            self._add_run(event)
        elif event.task == EventKind.STEP:
            self._add_step(event)
        elif event.task == EventKind.ACTIVITY:
            self.activities[worker_of(event)].append(event.metrics)
        elif event.task == EventKind.QUEUE:
            self.queue = event.metrics
        elif event.task == EventKind.DISPATCH:
            self.dispatch = event.metrics
        elif event.task == EventKind.DISPATCH_CHANGE:
            self.dispatch = {**self.dispatch, **event.metrics}
        elif event.task == EventKind.SCALE:
            self._add_change(event)
        elif event.task == EventKind.WORKER_DIED:
            self.deaths += 1
            self.dead.add(worker_of(event))
        elif event.task == EventKind.EVALUATION:
            self._add_evaluation(event)
        self._follow(event)

    def elapsed(self, now: float) -> float:
        """Return the seconds of the run at the monotonic time `now`."""
        return self._last_end + (now - self._seen_at if self._seen_at is not None else 0.0)

    @property
    def remaining(self) -> float:
        """Seconds to go: for each step left, the median step plus the mean time between steps (checkpoints)."""
        if not self._step_seconds:
            return 0.0
        mean_between = self._between_steps / len(self._step_seconds)
        return (statistics.median(self._step_seconds) + mean_between) * max(0, self.total_steps - self.done)

    def _add_run(self, event: Event) -> None:
        total = event.info.get("total_steps")
        self.total_steps = total if isinstance(total, int) else self.total_steps
        resumed = event.info.get("resumed_from")
        config = event.info.get("config")
        words = [setting(config, "algorithm.type"), setting(config, "model.path")]
        words.append(f"{self.total_steps} steps")
        words.append(f"resumed from {resumed}" if resumed else "")
        self.headline = " · ".join(word for word in words if word)

    def _add_step(self, event: Event) -> None:
        if not self._step_seconds:
            self._first_start = event.start
        self._between_steps = max(0.0, event.start - self._first_start - sum(self._step_seconds))
        self._step_seconds.append(event.end - event.start)
        self.done = self.done + 1 if event.step is None else event.step + 1
        self.total_steps = max(self.total_steps, self.done)
        for name, value in event.metrics.items():
            if not math.isfinite(value):
                continue
            if name.startswith(TIME.prefix):
                task = name.removeprefix(TIME.prefix)
                self.task_seconds[task] = self.task_seconds.get(task, 0.0) + value
            else:
                self.metrics.setdefault(name, []).append(value)

    def _add_change(self, change: Event) -> None:
        """Take a change of the number of engines, and forget what workers did that have left."""
        self.scaled = change
        for worker in [worker for worker in self.activities if has_engine(worker)]:
            if worker not in change.info["engines"]:
                del self.activities[worker]

    def _add_evaluation(self, event: Event) -> None:
        for name in shown_in(Shown.HELD_OUT):
            if math.isfinite(event.metrics.get(name, math.nan)):
                self.held_out.setdefault(name, []).append(event.metrics[name])

    def _follow(self, event: Event) -> None:
        """Guess the present phase of the run from the event that has just ended."""
        if event.task == EventKind.SAMPLE:
            self._responses += 1
            self.phase = f"generating: {self._responses} responses finished"
            return
        if event.task == EventKind.STEP:
            self._responses = 0
        self.phase = event.about.phase or self.phase
