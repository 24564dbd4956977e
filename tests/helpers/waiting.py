"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LIMIT_S = 30.0


def until(condition: Callable[[], bool], *, what: Callable[[], object] | None = None) -> None:
    """Ask until it is so. Fails after 30 s, with what `what` then returns."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what() if what else "it does not come about"
        time.sleep(0.005)  # so that the other one has the core
