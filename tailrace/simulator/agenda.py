"""What will happen, in the order of its time.

Actions of one time happen in the order in which they were entered, so that the same simulation always does the same.
An action may enter others, and cancel what has not happened yet.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


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

    def run(self, until: float = float("inf")) -> None:
        """Let all happen that has a time up to `until`, or until `stop`."""
        while self._heap and self._heap[0][0] <= until:
            time, _, entry = heappop(self._heap)
            if entry.action is not None:
                self.now = time
                action, entry.action = entry.action, None
                action()

    def stop(self) -> None:
        """Forget all that has not happened."""
        self._heap.clear()
