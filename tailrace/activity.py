"""Measures the time of a worker: at each moment it is busy, waits for weights, waits for data, or is idle.

A worker does several things at once (an engine generates while a task waits for prompts). So a state counts only where
none above it holds: busy ▶ weights ▶ data ▶ idle. A worker that neither works nor declares a wait is idle. The seconds
of the four states add up to the time that has passed.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from typing import Literal, ParamSpec, TypeVar

from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind

P = ParamSpec("P")
T = TypeVar("T")

State = Literal["busy", "weights", "data", "idle"]

STATES: tuple[State, ...] = ("busy", "weights", "data", "idle")
"""The states by precedence: the first that holds counts."""


class Activity:
    """Adds up the seconds of each state. Any task of any thread may enter states, and they may overlap."""

    def __init__(self, log: EventLog, actor: str) -> None:
        """`actor`: the owner of the time, in the events that `emit` writes."""
        self._log = log
        self._actor = actor
        self._lock = threading.Lock()
        self._holding = dict.fromkeys(STATES, 0)
        self._holding["idle"] = 1
        self._begin = self._counted_to = log.now()
        self._seconds: dict[str, float] = dict.fromkeys(STATES, 0.0)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the block as work."""
        with self._in("busy"):
            yield

    @contextmanager
    def waiting(self, what: Literal["data", "weights"]) -> Iterator[None]:
        """Count the block as waiting for rows of the queue or for new weights."""
        with self._in(what):
            yield

    def emit(self) -> None:
        """Write one event `activity` of the time since the last: its metrics are the seconds of each state."""
        with self._lock:
            self._count()
            begin, seconds = self._begin, self._seconds
            self._begin, self._seconds = self._counted_to, dict.fromkeys(STATES, 0.0)
            end = self._counted_to
        self._log.emit(Event(task=EventKind.ACTIVITY, actor=self._actor, start=begin, end=end, metrics=seconds))

    @contextmanager
    def _in(self, state: State) -> Iterator[None]:
        self._change(state, 1)
        try:
            yield
        finally:
            self._change(state, -1)

    def _change(self, state: State, by: int) -> None:
        with self._lock:
            self._count()
            self._holding[state] += by

    def _count(self) -> None:
        """Add the time since the last change to the present state."""
        now = self._log.now()
        state = next(state for state in STATES if self._holding[state])
        self._seconds[state] += now - self._counted_to
        self._counted_to = now


class TimedExecutor(Executor):
    """Runs work on a device and counts it as busy. The device is one thread, which several of these may share."""

    def __init__(
        self, device: Executor, activity: Activity | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`device`: of one thread. `activity`: counts the time; None until there is a log. `clock`: seconds."""
        self.activity = activity
        self._device = device
        self._clock = clock
        self._began: float | None = None

    @property
    def computing_s(self) -> float:
        """Seconds since the present computation began; 0 while there is none."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` when the thread is free; waiting for that does not count."""

        def timed() -> T:
            self._began = self._clock()
            try:
                with self.activity.busy() if self.activity else nullcontext():
                    return fn(*args, **kwargs)
            finally:
                self._began = None

        return self._device.submit(timed)
