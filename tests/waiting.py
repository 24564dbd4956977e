"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LIMIT_S = 30.0


def until(condition: Callable[[], bool], *, what: object = "it does not come about") -> None:
    """Ask until it is so; fails after 30 s, with `what` or what that returns."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.005)  # so that the other one has the core
