"""Waiting for another thread or process."""

import time
from collections.abc import Callable

LIMIT_S = 30.0


def until(condition: Callable[[], bool], *, what: Callable[[], object] | None = None) -> None:
    """Wait until `condition` holds. Fail after 30 s with the result of `what`."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what() if what else "it does not come about"
        time.sleep(0.005)  # so that the other thread or process gets the core
