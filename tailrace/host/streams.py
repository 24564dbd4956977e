"""Standard output and error take every text, and a long run outlives whoever reads them."""

import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tailrace.errors import TailraceWarning, printable


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


def warn_in_one_line(speaker: str = "") -> None:
    """From now on a warning of Tailrace's is one line: where in its code it was given is of no interest.

    Warnings of other libraries stay as they are. `speaker`: how the line begins.
    """

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, TailraceWarning):
            print(f"{speaker}warning: {printable(str(message))}", file=sys.stderr)
        else:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = show


@contextmanager
def outliving_readers() -> Iterator[None]:
    """In the block, text goes nowhere once its terminal has closed, or the program that reads its pipe has ended.

    Python would raise an error at each print: `train | tee log` loses its reader by the Ctrl-C that asks it to save.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outliving(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO) -> TextIO:
    """One that writes to the same file; `stream` itself where it has none, as in a notebook."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        descriptor = stream.fileno()
    except OSError:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Outliving(io.FileIO):
    def write(self, data: Any, /) -> int:
        """See `io.FileIO`; of text for nobody, all is taken."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def _strict() -> list[io.TextIOWrapper]:
    """Those that raise. Standard error escapes by default; a notebook has streams of another kind, for any text."""
    streams = (sys.stdout, sys.stderr)
    return [stream for stream in streams if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict"]
