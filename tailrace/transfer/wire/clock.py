"""The clock of a server, which stands still while its process is stopped or busy."""

import time
from collections.abc import Callable

LONGEST_STEP_S = 1.0
"""The longest step that the clock counts. A loop that runs reads its clock more often."""


class RunningClock:
    """Seconds that pass only while the clock is read: a step longer than `LONGEST_STEP_S` counts as that long.

    A process that was stopped or busy, or whose machine was suspended, has not heard the messages of others meanwhile.
    By this clock no peer has been silent, and no lease has ended, before those messages are read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that always pass."""
        self._clock = clock
        self._looked = clock()
        self._missed = 0.0

    def __call__(self) -> float:
        """The seconds so far; never less than before."""
        now = self._clock()
        if now - self._looked > LONGEST_STEP_S:
            self._missed += now - self._looked - LONGEST_STEP_S
        self._looked = now
        return now - self._missed
