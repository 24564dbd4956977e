"""A clock that a test can move on."""

import time


class Clock:
    """A clock that runs as usual, and jumps when the test says so."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def jump(self, seconds: float) -> None:
        self._ahead += seconds
