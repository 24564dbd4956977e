"""How much the longest tests do: a part of it in `make test`, all of it in `make test-long`."""

import os

LONG = "TAILRACE_LONG_TESTS" in os.environ


def effort(whole: int, part: int) -> int:
    """The amount of a test's work, such as its rounds: `whole` in `make test-long`, else `part`."""
    return whole if LONG else part
