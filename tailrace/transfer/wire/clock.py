"""The clock of a server, which stands still while its process does not run."""

import time
from collections.abc import Callable

LONGEST_STEP_S = 1.0
"""A loop that runs looks at its clock more often."""


class RunningClock:
    """Seconds that go by while somebody looks at them: a step longer than `LONGEST_STEP_S` counts as one of that.

    A process that was stopped or busy, or whose machine was suspended, has not heard what others said meanwhile. By
    this clock none of them has been silent, and no lease has come to its end, before they are heard.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that go by always."""
        self._clock = clock
        self._looked = clock()
        self._missed = 0.0

    def __call__(self) -> float:
        """Seconds; never less than before."""
        now = self._clock()
        if now - self._looked > LONGEST_STEP_S:
            self._missed += now - self._looked - LONGEST_STEP_S
        self._looked = now
        return now - self._missed
