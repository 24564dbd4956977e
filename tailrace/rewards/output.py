"""The output of graders, line by line."""

import re
import sys
from collections.abc import Callable

_MAX_LINE_BYTES = 2000
"""A longer line is cut."""
_MAX_LINES = 10_000
"""The most lines of all graders of a pool, so that a terminal or a log stays useful."""
_LAST_CHARS = 500
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that control a terminal: a response that is printed may hold anything."""


class Lines:
    """Splits the output of one process into lines."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._recent: list[str] = []

    @property
    def last(self) -> str:
        """The end of the output, on one line."""
        return " ".join(" ".join(self._recent).split())[-_LAST_CHARS:]

    def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            self._emit(self._rest + line)
            self._rest = b""
        self._rest = (self._rest + rest)[: _MAX_LINE_BYTES + 1]

    def end(self) -> None:
        """End the output; the bytes after the last end of line become a line."""
        if self._rest:
            self._emit(self._rest)
        self._rest = b""

    def _emit(self, line: bytes) -> None:
        cut = "…" if len(line) > _MAX_LINE_BYTES else ""
        # a progress bar draws over itself: only the last drawing is a line
        text = line[:_MAX_LINE_BYTES].rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") + cut
        text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
        self._recent = [*self._recent[-9:], text]
        self._on_line(text)


class Printed:
    """Prints the lines of the graders of a pool on standard error, up to a limit, each behind its grader's name."""

    def __init__(self) -> None:
        self._left = _MAX_LINES

    def of(self, name: str) -> Callable[[str], None]:
        """The function that takes the lines of the grader `name`."""
        return lambda line: self._show(f"{name}: {line}")

    def _show(self, line: str) -> None:
        if self._left > 0:
            print(line, file=sys.stderr)
        elif self._left == 0:
            print(f"graders have printed {_MAX_LINES:,} lines; further ones are not shown", file=sys.stderr)
        self._left -= 1
