"""Python's collector of garbage in cycles, which looks at all objects again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_GARBAGE = 100_000
"""New objects after which it looks for cycles."""


@contextmanager
def spared() -> Iterator[None]:
    """Have the collector look seldom as long as the block lasts, and not at the objects that are there before.

    This is for work that makes many objects and few cycles. Where there are millions, looking at them takes a fifth of
    the time.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_GARBAGE, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
