"""The workers of a run: their names and order, their time, and the way of new weights to them."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tailrace.config.cluster import ROLLOUT, kind_of_pool, pool_in_table
from tailrace.events import Event
from tailrace.registers.events import EventKind, title
from tailrace.registers.phases import STATES, State
from tailrace.report.run_data import RunData

STATE_TITLES: dict[State, str] = {
    "busy": "busy",
    "data": "waiting for data",
    "weights": "waiting for weights",
    "idle": "idle",
}
"""The states of a worker, in the order in which they are shown."""
_ACTORS = ("driver", "rollout", "engine", "reward", "reference", "trainer", "weights")
"""Kinds of workers, and the actors within each, in the order of their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """A summary of one worker after the warm-up."""

    worker: str
    seconds: dict[str, float]
    """Seconds in each state (`STATES`)."""
    deaths: int
    """Number of its deaths in the whole run."""
    versions: int
    """Number of weight versions that it installed."""
    weights_s: float | None
    """Median seconds from the publication of weights until they were installed; None where none were installed."""

    @property
    def total(self) -> float:
        """Seconds in all states."""
        return sum(self.seconds.values())

    def share(self, state: str) -> float:
        """Return the part of its time that it spent in `state`."""
        return self.seconds[state] / self.total if self.total > 0 else 0.0


def worker_of(event: Event) -> str:
    """Return the worker of an event. An event that the driver emits about a worker has the worker as its actor."""
    return event.worker or event.actor


def row_of(event: Event) -> tuple[str, str]:
    """Return the worker and the actor in whose row an event stands."""
    match event.about.row:
        case "worker":
            return worker_of(event), _work_of(worker_of(event))
        case "weights":
            return worker_of(event), "weights"
        case _:
            return event.worker, event.actor


def kind_of(worker: str) -> str:
    """Return the kind of a worker, its pool: rollout for rollout-0, rollout.large for rollout.large-0."""
    return re.sub(r"-\d+$", "", worker)


def has_engine(worker: str) -> bool:
    """Whether a worker is of a rollout pool."""
    return _work_of(worker) == ROLLOUT


def worker_order(worker: str) -> tuple[int, str, int]:
    """The sort key of workers: the run's own process, rollout, reward, reference, trainer, others; then by number."""
    number = re.search(r"-(\d+)$", worker)
    place = _place(_work_of(worker)) if worker else 0
    return place, kind_of(worker), int(number[1]) if number else 0


def row_order(worker: str, actor: str) -> tuple[tuple[int, str, int], int, str]:
    """The sort key of rows: by worker, then by actor."""
    return worker_order(worker), _place(actor), actor


def row_name(worker: str, actor: str) -> str:
    """Return the name of an actor's row: engine in a run of one process, rollout-0 · engine in a worker."""
    if not worker:
        return actor
    return worker if actor == _work_of(worker) else f"{worker} · {actor}"


def death_text(event: Event) -> str:
    """Describe the death of a worker, and its cause where that is known."""
    return ": ".join(word for word in (f"{worker_of(event)} died", str(event.info.get("how") or "")) if word)


def mark_text(event: Event) -> str:
    """Return the text of an event's mark in the timeline."""
    match event.task:
        case EventKind.RUN:
            resumed = event.info.get("resumed_from")
            return f"resumed from {resumed}" if resumed else "start"
        case EventKind.WORKER_DIED:
            return death_text(event)
        case EventKind.SCALE | EventKind.DISPATCH_CHANGE:
            return str(event.info["text"])
        case task:
            return title(task)


def summaries(run: RunData) -> list[WorkerSummary]:
    """Return a summary of each worker that has reported its activity."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(STATES, 0.0))
    for event in _after_warm_up(run):
        for state in STATES:
            seconds[worker_of(event)][state] += event.metrics.get(state, 0.0)
    deaths = Counter(map(worker_of, run.of(EventKind.WORKER_DIED)))
    flights: dict[str, list[float]] = defaultdict(list)
    for event in weight_flights(run.events):
        flights[event.worker].append(event.end - event.start)
    return [
        WorkerSummary(
            worker=worker,
            seconds=seconds[worker],
            deaths=deaths[worker],
            versions=len(flights[worker]),
            weights_s=statistics.median(flights[worker]) if flights[worker] else None,
        )
        for worker in sorted(seconds, key=worker_order)
    ]


def restarts(run: RunData) -> int:
    """Return the number of workers that were started after one of the same name had died."""
    died: set[str] = set()
    count = 0
    for event in run.of(EventKind.WORKER_DIED, EventKind.WORKER_STARTED):
        if event.task == EventKind.WORKER_DIED:
            died.add(worker_of(event))
        elif worker_of(event) in died:
            count += 1
    return count


def weight_flights(events: Iterable[Event]) -> list[Event]:
    """Return the ways of weights, as spans from the publication of a version until a worker had installed it.

    The way to a worker that was started after the publication begins with the worker.
    """
    events = sorted(events, key=lambda event: event.end)
    published = {event.version: event.start for event in events if event.task == EventKind.WEIGHTS_PUBLISH}
    started: dict[str, float] = {}
    flights: list[Event] = []
    for event in events:
        if event.task == EventKind.WORKER_STARTED:
            started[worker_of(event)] = event.end
        elif event.task == EventKind.UPDATE_WEIGHTS and event.worker and event.version in published:
            begun = max(published[event.version], started.get(event.worker, 0.0))
            flights.append(
                Event(
                    task=EventKind.WEIGHTS_IN_FLIGHT,
                    actor="weights",
                    start=min(begun, event.start),
                    end=event.end,
                    version=event.version,
                    worker=event.worker,
                )
            )
    return flights


def _work_of(worker: str) -> str:
    return pool_in_table(kind_of(worker))


def _place(actor: str) -> int:
    kind = kind_of_pool(actor)
    return _ACTORS.index(kind) if kind in _ACTORS else len(_ACTORS)


def _after_warm_up(run: RunData) -> Sequence[Event]:
    """Return the activity of workers after the first step; all of it where there is none since."""
    said = list(run.of(EventKind.ACTIVITY))
    steps = run.steps
    return [event for event in said if steps and event.start >= steps[0].end] or said
