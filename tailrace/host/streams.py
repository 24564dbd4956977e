"""Standard output and error: they take every text, and a long run outlives their readers."""

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
    """Replace characters that the encoding of standard output or error lacks, so that every text can be printed.

    The locale or PYTHONIOENCODING sets the encoding.
    """
    for stream in _strict():
        stream.reconfigure(errors="replace")


@contextmanager
def unencodable_replaced() -> Iterator[None]:
    """Do as `replace_unencodable` inside the block alone, in a program that owns its streams."""
    changed = _strict()
    replace_unencodable()
    try:
        yield
    finally:
        for stream in changed:
            stream.reconfigure(errors="strict")


def warn_in_one_line(speaker: str = "") -> None:
    """Print each warning of Tailrace as one line from now on, without its place in the code.

    Warnings of other libraries stay as they are. `speaker`: the beginning of the line.
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
    """Drop printed text inside the block once the terminal has closed or the program that reads the pipe has ended.

    Otherwise Python raises an error at each print: in `train | tee log`, the Ctrl-C that asks for a save ends `tee`.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outliving(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as of a program that began without it
                stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO | None) -> TextIO | None:
    """A stream that writes to the same file; `stream` itself if it has none: in a notebook, or closed."""
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
        line_buffering=stream.line_buffering or stream.write_through,  # PYTHONUNBUFFERED: text reaches the file at once
    )


class _Outliving(io.FileIO):
    def write(self, data: Any, /) -> int:
        """Write as `io.FileIO` does, but accept and drop all text once the reader is gone."""
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
    """The streams that raise at unencodable text.

    Standard error escapes it by default. A notebook has streams of another kind, which take any text.
    """
    streams = (sys.stdout, sys.stderr)
    return [stream for stream in streams if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict"]
