"""Measures the time of a worker: at each moment it is in one phase, such as generation, waiting for data, or idle.

A worker does several things at once (an engine generates while a task waits for prompts). So a phase counts only where
none above it in `PHASES` holds: work ▶ waiting for weights ▶ for tools ▶ for data ▶ idle. A worker that neither works
nor declares a wait is idle. The seconds of the phases add up to the time that has passed, and so do those of the states
busy, weights, data and idle, of which each phase is a part.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import ParamSpec, TypeVar

from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind
from tailrace.registers.phases import PHASES, STATES, Phase, Wait, Work

P = ParamSpec("P")
T = TypeVar("T")


class Activity:
    """Adds up the seconds of each phase. Any task of any thread may enter phases, and they may overlap."""

    def __init__(self, log: EventLog, actor: str, *, breakdown: bool = False) -> None:
        """`actor`: the owner of the time, in the events that `emit` writes.

        `breakdown`: whether `emit` also writes the seconds of each phase, and not those of the states alone.
        """
        self._log = log
        self._actor = actor
        self._breakdown = breakdown
        self._lock = threading.Lock()
        self._holding: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._holding["idle"] = 1
        self._begin = self._counted_to = log.now()
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._parts: list[tuple[Phase, Callable[[], Mapping[str, float]]]] = []

    @contextmanager
    def busy(self, phase: Work = "other") -> Iterator[None]:
        """Count the block as work."""
        with self._in(phase):
            yield

    @contextmanager
    def waiting(self, what: Wait) -> Iterator[None]:
        """Count the block as waiting for new weights, for tools, or for rows of the queue."""
        with self._in(what):
            yield

    def divide(self, phase: Work, take_seconds: Callable[[], Mapping[str, float]]) -> None:
        """From now on, tell the parts of a phase with it. `take_seconds` returns the seconds since its last call."""
        self._parts.append((phase, take_seconds))

    def emit(self) -> None:
        """Write one event `activity` of the time since the last, with the seconds of each state.

        With `breakdown`, an event of that name comes before it. It has the seconds of the phases, and those of their
        parts as `<phase>/<part>`, as far as they are known. What is 0 is left out.
        """
        with self._lock:
            self._count()
            begin, seconds = self._begin, self._seconds
            self._begin, self._seconds = self._counted_to, dict.fromkeys(PHASES, 0.0)
            end = self._counted_to
        if self._breakdown:
            self._emit(EventKind.BREAKDOWN, begin, end, self._broken_down(seconds))
        states = dict.fromkeys(map(str, STATES), 0.0)
        for phase, spent in seconds.items():
            states[PHASES[phase].state] += spent
        self._emit(EventKind.ACTIVITY, begin, end, states)

    def _emit(self, kind: EventKind, begin: float, end: float, metrics: dict[str, float]) -> None:
        self._log.emit(Event(task=kind, actor=self._actor, start=begin, end=end, metrics=metrics))

    def _broken_down(self, seconds: Mapping[Phase, float]) -> dict[str, float]:
        told: dict[str, float] = defaultdict(float, {phase: spent for phase, spent in seconds.items() if spent})
        for phase, take_seconds in self._parts:
            for part, spent in take_seconds().items():
                told[f"{phase}/{part}"] += spent
        return told

    def enter(self, phase: Phase) -> None:
        """Count a phase from now on; `busy` and `waiting` do it for a block."""
        self._change(phase, 1)

    def leave(self, phase: Phase) -> None:
        """End what `enter` began."""
        self._change(phase, -1)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase)

    def _change(self, phase: Phase, by: int) -> None:
        with self._lock:
            self._count()
            self._holding[phase] += by

    def _count(self) -> None:
        """Add the time since the last change to the present phase."""
        now = self._log.now()
        phase = next(phase for phase in PHASES if self._holding[phase])
        self._seconds[phase] += now - self._counted_to
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

    def during(self, phase: Work) -> Executor:
        """An executor for the same device, whose work counts as this phase."""
        return _During(self, phase)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` when the thread is free; waiting for that does not count. It is other work."""
        return self.submit_as("other", partial(fn, *args, **kwargs))

    def submit_as(self, phase: Work, work: Callable[[], T]) -> Future[T]:
        """Run `work` when the thread is free, as work of this phase."""

        def timed() -> T:
            self._began = self._clock()
            try:
                with self.activity.busy(phase) if self.activity else nullcontext():
                    return work()
            finally:
                self._began = None

        return self._device.submit(timed)


class _During(Executor):
    """See `TimedExecutor.during`."""

    def __init__(self, executor: TimedExecutor, phase: Work) -> None:
        self._executor = executor
        self._phase: Work = phase

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit_as(self._phase, partial(fn, *args, **kwargs))
