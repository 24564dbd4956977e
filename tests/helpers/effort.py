"""How much the longest tests do: a part of it in `make test`, all of it in `make test-long`."""

import os

import pytest

LONG = "TAILRACE_LONG_TESTS" in os.environ
long_only = pytest.mark.skipif(not LONG, reason="it takes a minute; make test-long runs it")


def effort(whole: int, part: int) -> int:
    """The amount of a test's work, such as its rounds: `whole` in `make test-long`, else `part`."""
    return whole if LONG else part
