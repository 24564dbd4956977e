"""Python's collector of garbage in cycles, which looks at all objects again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spared() -> Iterator[None]:
    """Keep the collector from the objects that are there, as long as the block lasts: they stay until its end anyway.

    Where there are millions, looking at them takes a fifth of the time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
