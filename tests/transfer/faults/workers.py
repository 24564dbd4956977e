"""The producers and consumers that are killed, as the test sees them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.transfer.faults.worker import SILENCE_S, TIMEOUT_S


class Workers:
    """Producers and consumers by name. A killed one is started again with the same role."""

    def __init__(self, connection: Path, roles: dict[str, str], *, silence_s: float = SILENCE_S) -> None:
        self._roles = roles
        self._errors = connection.with_name("workers.log")
        self.pids: dict[str, int] = {}
        with self._errors.open("wb") as errors:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.transfer.faults.worker", str(connection), str(silence_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        for name in self._roles:
            self._start(name)
        return self

    def is_alive(self, name: str) -> bool:
        """Whether the worker still runs."""
        return Path(f"/proc/{self.pids[name]}").exists()

    def start(self, name: str, role: str) -> None:
        """Start another worker."""
        self._roles[name] = role
        self._start(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.close()
        self._nursery.stdout.close()
        self._nursery.wait(TIMEOUT_S)
        if said := self._errors.read_text():
            raise AssertionError(f"a worker failed: {said}")

    def kill(self, name: str) -> None:
        """Kill a worker, and start another in its place."""
        with suppress(ProcessLookupError):  # the producer has put all and ended; a failed worker is reported at the end
            os.kill(self.pids[name], signal.SIGKILL)
        self._start(name)

    def _start(self, name: str) -> None:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        print(self._roles[name], file=self._nursery.stdin, flush=True)
        self.pids[name] = int(self._nursery.stdout.readline())
