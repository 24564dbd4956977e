"""What will happen, in the order of its time.

Actions of one time happen in the order in which they were entered, so that the same simulation always does the same.
An action may enter others, and cancel what has not happened yet.

A process is a generator that the agenda drives. It yields the seconds that it takes, a `Change` that it waits for, or
both, for whichever comes first:

    while not rows:
        yield arrived           # a Change: others call `arrived.tell()`
    yield 0.5                   # it works for half a second
    yield 0.5, interrupted      # or less

The agenda is its own code and not SimPy's: engines cancel and move their next event with every request that comes,
which costs a heap entry here and several objects there, and a simulated run of a thousand devices has millions of them.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import Any

Action = Callable[[], None]
Process = Generator[Any, None, None]
"""Yields what it waits for: `float | Change | tuple[float, Change]`."""


class Entry:
    """An action that is to happen. `cancel` it to have it not happen."""

    __slots__ = ("action", "time")

    def __init__(self, time: float, action: Action) -> None:
        self.time = time
        self.action: Action | None = action

    def cancel(self) -> None:
        """Have it not happen; nothing where it has happened."""
        self.action = None


class Agenda:
    """A clock that jumps from one action to the next."""

    def __init__(self) -> None:
        self._stopped = False
        self.now = 0.0
        """Seconds since the start of the simulation."""
        self._heap: list[tuple[float, int, Entry]] = []
        self._numbers = count()

    def at(self, time: float, action: Action) -> Entry:
        """Have an action happen at `time`, which is not over; what is late by a rounding error happens now."""
        entry = Entry(max(time, self.now), action)
        heappush(self._heap, (entry.time, next(self._numbers), entry))
        return entry

    def after(self, seconds: float, action: Action) -> Entry:
        """Have an action happen in `seconds`."""
        return self.at(self.now + seconds, action)

    def start(self, process: Generator[Any, None, Any]) -> None:
        """Drive a process from now on."""

        def resume() -> None:
            match next(process, None):
                case Change() as change:
                    change.waiting.append(resume)
                case (seconds, change):
                    self._resume_once(seconds, change, resume)
                case None:
                    pass
                case seconds:
                    self.after(seconds, resume)

        self.after(0.0, resume)

    def _resume_once(self, seconds: float, change: "Change", resume: Action) -> None:
        """Go on after so long, or with the change."""

        def first() -> None:
            if entry.action is not None:  # not when the seconds were over before
                entry.cancel()
                resume()

        entry = self.after(seconds, resume)
        change.waiting.append(first)

    def run(self, until: float = float("inf")) -> None:
        """Let all happen that has a time up to `until`, or until `stop`."""
        self._stopped = False
        while not self._stopped and self._heap and self._heap[0][0] <= until:
            time, _, entry = heappop(self._heap)
            if entry.action is not None:
                self.now = time
                action, entry.action = entry.action, None
                action()

    def stop(self) -> None:
        """Let nothing happen any more, not even what the present action still has happen."""
        self._stopped = True


class Change:
    """Something that processes wait for; they look for themselves whether it was what they wait for."""

    def __init__(self, agenda: Agenda) -> None:
        self.waiting: list[Action] = []
        self._agenda = agenda

    def tell(self) -> None:
        """Let all that wait go on, at the present time."""
        waiting, self.waiting = self.waiting, []
        for resume in waiting:
            self._agenda.after(0.0, resume)


class Turns:
    """Lets one process at a time do something, in the order of asking."""

    def __init__(self, agenda: Agenda) -> None:
        self._numbers = count()
        self._next = 0
        """The number whose turn it is."""
        self._left = Change(agenda)

    def take(self) -> Process:
        """Wait for a turn."""
        number = next(self._numbers)
        while number != self._next:
            yield self._left

    def leave(self) -> None:
        """Pass it on."""
        self._next += 1
        self._left.tell()
