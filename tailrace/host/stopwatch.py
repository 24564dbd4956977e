"""A stopwatch with a sum for each part of the work."""

import time


class Stopwatch:
    """Adds up the time between laps, by part. One thread measures; any thread may take the sums.

    The sums only grow, and `take` keeps what it has returned. So no lap is lost, and none needs a lock.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        """Seconds by part since the stopwatch was made."""
        self._taken: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        """Begin the first lap."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`."""
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    def add(self, part: str, seconds: float) -> None:
        """Add time that was measured elsewhere to `part`."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call; parts without any are left out."""
        before, self._taken = self._taken, dict(self._seconds)
        grown = {part: seconds - before.get(part, 0.0) for part, seconds in self._taken.items()}
        return {part: seconds for part, seconds in grown.items() if seconds > 0}
