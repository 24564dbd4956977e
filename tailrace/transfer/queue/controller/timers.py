"""What is to happen when, for a loop that asks for the next time and for what is due."""

import heapq
from collections.abc import Callable


class Timer:
    """One thing to do; `cancel` it where it is not needed any more."""

    def __init__(self, timers: "Timers", then: Callable[[], None]) -> None:
        self._timers = timers
        self.then: Callable[[], None] | None = then

    def cancel(self) -> None:
        """Do nothing when the time comes; harmless twice, and when it has come."""
        if self.then is not None:
            self.then = None
            self._timers.forget_one()


class Timers:
    """Things to do by their times. Those that were cancelled take no more room than those that were not."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._cancelled = 0

    def __len__(self) -> int:
        """Entries that are kept, those that were cancelled included."""
        return len(self._heap)

    def at(self, when: float, then: Callable[[], None]) -> Timer:
        """Do `then` at the time `when`."""
        self._count += 1
        timer = Timer(self, then)
        heapq.heappush(self._heap, (when, self._count, timer))
        return timer

    @property
    def next(self) -> float | None:
        """When something is due."""
        while self._heap and self._heap[0][2].then is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Do what is due, in the order of the times."""
        while (when := self.next) is not None and when <= now:
            timer = heapq.heappop(self._heap)[2]
            then, timer.then = timer.then, None
            assert then is not None, "cancelled ones are gone"
            then()

    def forget_one(self) -> None:
        """A timer was cancelled: a claim that may wait for an hour and is served at once leaves one for an hour."""
        self._cancelled += 1
        if self._cancelled > 64 and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].then is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0
