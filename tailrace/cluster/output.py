"""Reads the output of a worker, line by line."""

import asyncio
from collections import deque
from collections.abc import Callable

from tailrace.errors import printable

_CHUNK_BYTES = 65_536
_MAX_LINE_BYTES = 65_536
"""The longest line. A longer one is cut into several."""
_MAX_LINES = 10_000
"""The most lines that wait to be taken. If there are more, the oldest are dropped."""
_LAST_CHARS = 300


class Output:
    """Reads a pipe to its end and keeps the lines until they are taken."""

    def __init__(self, reader: asyncio.StreamReader, on_line: Callable[[], None]) -> None:
        self.last = ""
        """The last line that was not blank, shortened for messages."""
        self._reader = reader
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._reading = asyncio.create_task(self._read())

    def take(self) -> tuple[str, ...]:
        """Return the lines since the last call."""
        lines = tuple(self._lines)
        self._lines.clear()
        return lines

    async def finish(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for the end of the pipe, when no process holds its other end. Then stop."""
        await asyncio.wait([self._reading], timeout=limit_s)
        self._reading.cancel()

    async def _read(self) -> None:
        rest = b""
        while chunk := await self._reader.read(_CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                whole, rest = [*whole, rest], b""
            for line in whole:
                self._add(line)
        if rest:
            self._add(rest)

    def _add(self, line: bytes) -> None:
        # A progress bar draws over itself: only the text after the last \r stays.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if text.strip():
            self.last = printable(text.strip()[:_LAST_CHARS])
        self._lines.append(text)
        self._on_line()
