"""The last output of a process."""

import os
import threading
from contextlib import suppress
from typing import IO

from tailrace.host.children import last_output

_BYTES, _LINES = 4000, 3


class Tail:
    """Reads the output of a process, and keeps the end of it."""

    def __init__(self, output: IO[bytes]) -> None:
        """Start to read `output`, the other end of the process's pipe.

        It is closed when the process and its children have closed their ends.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        try:
            self._reader.start()
        except RuntimeError:
            output.close()
            raise

    def __str__(self) -> str:
        """The last lines as one; see `last_output`."""
        lines = [line.strip() for line in self._bytes.decode(errors="replace").splitlines() if line.strip()]
        return last_output(" ".join(lines[-_LINES:]))

    def finish(self, limit_s: float) -> None:
        """Read the rest of the output of a process that has ended."""
        with suppress(RuntimeError):  # in a process that was forked since, there is no such thread
            self._reader.join(limit_s)

    def _read(self, output: IO[bytes]) -> None:
        with output:
            while chunk := os.read(output.fileno(), 65536):
                self._bytes += chunk
                del self._bytes[:-_BYTES]
