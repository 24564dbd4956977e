"""The event record. The runtime emits it; the display, the report and the timeline read it.

A span of work is one line of `events.jsonl`. Times are seconds since the run's start, so that a resumed run
goes on where the interrupted one stopped. They are the same in every process, as far as the clocks of machines agree.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tailrace.errors import UNREADABLE, UserError
from tailrace.registers.events import About, EventKind, about


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a run: a piece of work with its actor, its times, its amount and the weights it used."""

    task: str
    """The kind of work: an `EventKind`, or a task of a caller's own."""
    actor: str
    """The part that did it: driver, rollout, engine, reward, trainer … Each worker's is one line of the timeline."""
    start: float
    """Seconds since the start of the run."""
    end: float
    step: int | None = None
    """Training step, from 0."""
    samples: int | None = None
    tokens: int | None = None
    """Response tokens."""
    version: int | None = None
    """Weight version used or, for update_weights, installed."""
    metrics: dict[str, float] = {}
    """Named figures; `step` events carry every figure of their training step."""
    info: dict[str, Any] = {}
    """Further details: a request id, a path, a reason."""
    worker: str = ""
    """The process that did it, such as rollout-0; empty for the run's own."""

    @property
    def about(self) -> About:
        """The description of its kind: how such events are shown and counted."""
        return about(self.task)


Sink = Callable[[Event], None]


class EventLog:
    """The clock of a run, and the sinks of its events: a file, the display, or a connection to another process.

    A worker has its own log with the run's clock: it gets the `origin` of the driver's log.
    """

    def __init__(
        self, *, sinks: tuple[Sink, ...], offset: float = 0.0, worker: str = "", origin: float | None = None
    ) -> None:
        """`offset`: seconds that a resumed run had taken before. `worker`: the worker that emits the events.

        `origin`: the unix time at which the run's clock was 0; by default `offset` before now.
        """
        self._sinks = sinks
        self._worker = worker
        now, unix_now = time.perf_counter(), time.time()
        self.origin = unix_now - offset if origin is None else origin
        self._zero = now - (unix_now - self.origin)  # read once, so that a clock that is set later changes no span

    def now(self) -> float:
        """Seconds since the start of the run."""
        return self.at(time.perf_counter())

    def at(self, perf_counter: float) -> float:
        """The value of `now` at the time at which this process's `time.perf_counter` was `perf_counter`."""
        return perf_counter - self._zero

    def listen(self, sink: Sink) -> None:
        """Hand every further event to this sink, too."""
        self._sinks = (*self._sinks, sink)

    def emit(self, event: Event) -> None:
        """Hand `event` to the sinks. Metrics that are not finite are dropped: JSON cannot express them.

        The others become plain floats: those of a user's trainer may be NumPy's, which no encoder knows.
        """
        event.metrics = {name: float(value) for name, value in event.metrics.items() if math.isfinite(value)}
        event.worker = event.worker or self._worker
        self.forward(event)

    def forward(self, event: Event) -> None:
        """Hand the sinks an event that a worker's log emitted, unchanged."""
        for sink in self._sinks:
            sink(event)

    @contextmanager
    def span(self, task: str, actor: str, **fields: Any) -> Iterator[Event]:
        """Time a piece of work; the caller fills in the yielded event. Nothing is written if the work raises."""
        event = Event(task=task, actor=actor, start=self.now(), end=0.0, **fields)
        yield event
        event.end = self.now()
        self.emit(event)


class EventFile:
    """A sink that appends events to a file, one line each, except samples for people.

    Only the owner may read the file.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and drop a last line that was cut short.

        Raises:
            UserError: it cannot be written.
        """
        self._path = path
        try:
            drop_cut_line(path)
            self._file = open(path, "ab", opener=owner_only)  # noqa: SIM115  (until `close`)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None

    def __call__(self, event: Event) -> None:
        """Write one line.

        Raises:
            UserError: it cannot be written.
        """
        if event.task == EventKind.SAMPLES:
            return
        try:
            self._file.write(msgspec.json.encode(event) + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {error.strerror}; mend that, then go on with --resume"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def owner_only(path: str, flags: int) -> int:
    """Open a file so that a new one is the owner's alone, as every file with texts of a run is.

    Use it as `open(path, "wb", opener=owner_only)`.
    """
    return os.open(path, flags, 0o600)


def drop_cut_line(path: Path) -> None:
    """Remove a last line that a crash or a full disk cut short, so that the next write begins a line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def read_events(path: Path) -> list[Event]:
    """Read the events of a run. A last line cut short by a crash is left out; any other broken line is an error.

    Raises:
        UserError: no such file, it cannot be read, or a line in the middle is not an event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; is {path.parent} the directory of a run?") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    events = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            events.append(msgspec.json.decode(line, type=Event))
        except UNREADABLE as error:
            raise UserError(f"{path}, line {number}, is not an event: {error}; remove that line") from None
    return events
