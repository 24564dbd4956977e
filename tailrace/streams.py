"""Standard output and error take every text: what their encoding lacks is written as a question mark."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def replace_unencodable() -> None:
    """From now on no text fails to be printed, whatever encoding the locale or PYTHONIOENCODING says."""
    for stream in _strict():
        stream.reconfigure(errors="replace")


@contextmanager
def unencodable_replaced() -> Iterator[None]:
    """The same for a while, in a program whose streams are its own."""
    changed = _strict()
    replace_unencodable()
    try:
        yield
    finally:
        for stream in changed:
            stream.reconfigure(errors="strict")


def _strict() -> list[io.TextIOWrapper]:
    """Those that raise. Standard error escapes by default; a notebook has streams of another kind, for any text."""
    streams = (sys.stdout, sys.stderr)
    return [stream for stream in streams if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict"]
