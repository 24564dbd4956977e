"""What is to happen when, for a loop that asks for the next time and for what is due."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, order=True)
class Timer:
    """One thing to do; `cancel` it where it is not needed any more."""

    when: float
    number: int
    then: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Do nothing when the time comes."""
        self.then = None


class Timers:
    """Things to do by their times."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._count = 0

    def at(self, when: float, then: Callable[[], None]) -> Timer:
        """Do `then` at the time `when`."""
        self._count += 1
        timer = Timer(when, self._count, then)
        heapq.heappush(self._heap, timer)
        return timer

    @property
    def next(self) -> float | None:
        """When something is due."""
        while self._heap and self._heap[0].then is None:
            heapq.heappop(self._heap)
        return self._heap[0].when if self._heap else None

    def run(self, now: float) -> None:
        """Do what is due, in the order of the times."""
        while (when := self.next) is not None and when <= now:
            then = heapq.heappop(self._heap).then
            assert then is not None, "cancelled ones are gone"
            then()
