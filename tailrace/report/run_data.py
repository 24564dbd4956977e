"""A run, read once from its events, without the work that was lost when it was resumed."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tailrace.errors import UserError
from tailrace.events import Event, owner_only, read_events
from tailrace.host.whole_file import whole_file
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.report.samples import SampleRecord, read_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The events of a run, without the work that was lost when it was resumed."""

    name: str
    events: Sequence[Event]
    """All events, in the order in which they were written."""
    last_event_at: datetime
    """The time at which the newest event was written."""
    texts: Sequence[SampleRecord] = ()
    """The samples that were kept for people."""

    @property
    def steps(self) -> list[Event]:
        """The finished training steps, by number."""
        return _newest_by_step(self.of(EventKind.STEP))

    @property
    def spans(self) -> list[Event]:
        """The events of work, without the frequent reports of workers and queue."""
        return [event for event in self.events if event.about.is_work]

    @property
    def evaluations(self) -> list[Event]:
        """The evaluations, by number of steps before them."""
        return _newest_by_step(self.of(EventKind.EVALUATION))

    @property
    def samples(self) -> list[Event]:
        """Every finished response of a training step."""
        return [event for event in self.of(EventKind.SAMPLE) if event.step is not None]

    @property
    def info(self) -> dict[str, Any]:
        """The contents of the newest `run` event: version, machine, number of steps."""
        return next((event.info for event in reversed(self.events) if event.task == EventKind.RUN), {})

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty where the run recorded none."""
        return self.info.get("config") or {}

    @property
    def total_steps(self) -> int:
        """Steps that the run is to make; where it does not say, the steps that it has made."""
        return int(self.info.get("total_steps") or len(self.steps))

    @property
    def resumes(self) -> int:
        """The number of times that the run was resumed."""
        return sum(1 for event in self.of(EventKind.RUN) if event.info.get("resumed_from"))

    @property
    def is_finished(self) -> bool:
        """Whether the last step has been trained."""
        steps = self.steps
        return bool(steps) and step_of(steps[-1]) + 1 >= self.total_steps

    @property
    def end(self) -> dict[str, Any]:
        """The contents of its `end` event; empty where the run goes on, or was killed."""
        last = next((event for event in reversed(self.events) if event.task in (EventKind.RUN, EventKind.END)), None)
        return last.info if last is not None and last.task == EventKind.END else {}

    @property
    def seconds(self) -> float:
        """Seconds from the start of the run to the end of its newest event."""
        return max(event.end for event in self.events)

    def of(self, *tasks: str) -> Iterator[Event]:
        """Return the events of some tasks."""
        return (event for event in self.events if event.task in tasks)


def load_run(run_dir: Path) -> RunData:
    """Read the run in `run_dir`.

    Raises:
        UserError: `run_dir` is not the directory of a run, the run recorded nothing, or a file of it is broken.
    """
    path = run_dir / run_files.EVENTS
    if not path.is_file():
        raise UserError(
            f"{run_dir} is not the directory of a run: it has no {run_files.EVENTS}; give a run's output_dir"
        )
    events = read_events(path)
    if not events:
        raise UserError(f"{path} is empty: the run recorded nothing; start it again")
    written = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).astimezone()
    samples = run_dir / run_files.SAMPLES
    texts = read_samples(samples) if samples.is_file() else []
    return RunData(name=run_dir.resolve().name, events=drop_superseded(events), last_event_at=written, texts=texts)


def write_file(run_dir: Path, name: str, content: bytes) -> Path:
    """Write the file `name` into the directory of a run, whole or not at all, and return its path.

    Only the owner may read it, as with the events and the samples that it shows.

    Raises:
        UserError: the operating system refused to write it, for example because the disk is full.
    """
    path = run_dir / name
    try:
        with whole_file(path) as partial, open(partial, "wb", opener=owner_only) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; make room, or see who may write there") from None
    return path


def drop_superseded(events: Iterable[Event]) -> list[Event]:
    """Return the events without the work that was lost when a run was resumed.

    A `run` event begins an attempt. The run's clock goes on from the time of the attempt's checkpoint. Work of earlier
    attempts that ended after that time is left out, except the writing of that checkpoint, which ends later. The deaths
    of workers stay, too; they are shown at the time where the attempt begins.
    """
    kept: list[Event] = []
    for event in events:
        if event.task == EventKind.RUN:
            kept = [
                _no_later(before, event.start)
                for before in kept
                if before.end <= event.start or before.about.survives_resume or _wrote(before, event)
            ]
        kept.append(event)
    return kept


def metric_series(events: Iterable[Event], name: str) -> tuple[list[int], list[float]]:
    """Return the steps (see `shown_step`) and the values of a metric, where an event has it and it is finite."""
    points = [(shown_step(event), event.metrics[name]) for event in events if name in event.metrics]
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def metric_names(events: Iterable[Event]) -> list[str]:
    """Return the names of the metrics of some events, in the order in which they first appear."""
    return list(dict.fromkeys(name for event in events for name in event.metrics))


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first five and of the last five values; with less than ten, of fewer, so that none counts
    twice.

    A lone value is both.
    """
    count = max(1, min(5, len(values) // 2))
    return statistics.fmean(values[:count]), statistics.fmean(values[-count:])


def step_of(event: Event) -> int:
    """Return the step of an event that must have one."""
    assert event.step is not None, event
    return event.step


def shown_step(event: Event) -> int:
    """Return the step of an event as it is shown, from 1; for an evaluation or a checkpoint, the steps before it."""
    return step_of(event) + (not event.about.step_is_count)


def median_seconds(events: Sequence[Event]) -> float:
    """Return the median length of some spans; 0 for none."""
    return statistics.median([event.end - event.start for event in events]) if events else 0.0


def _no_later(event: Event, time: float) -> Event:
    late = event.about.survives_resume and event.end > time
    return msgspec.structs.replace(event, start=time, end=time) if late else event


def _wrote(event: Event, attempt: Event) -> bool:
    """Return whether `event` is the writing of the checkpoint from which `attempt` goes on."""
    return event.task == EventKind.CHECKPOINT and event.info.get("path") == attempt.info.get("resumed_from")


def _newest_by_step(events: Iterable[Event]) -> list[Event]:
    newest = {event.step: event for event in events if event.step is not None}
    return sorted(newest.values(), key=step_of)
