"""The driver's end of one worker process."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT
from typing import IO

from tailrace.engine.ranks.wire import Channel
from tailrace.errors import EngineError

_REAP_LIMIT_S = 5.0
"""A killed process is gone in milliseconds; one stuck in the kernel is left to it."""
_EXIT_LIMIT_S = 1.0
"""A process closes its socket a moment before it exits; the exit code is worth the wait."""
_TAIL_BYTES, _TAIL_LINES = 4000, 3


class WorkerProcess:
    """A process that waits to be told which rank it is. What it prints is kept for its obituary."""

    def __init__(self, rank: int) -> None:
        """Start it.

        Raises:
            EngineError: the machine has no room for another process or thread.
        """
        self.rank = rank
        self._driver = os.getpid()
        self._killed = False
        self._killing = threading.Lock()
        self._tail = bytearray()
        try:
            ours = self._start()
        except OSError as error:
            raise EngineError(f"no process can be started for rank {rank}: {error.strerror}") from None
        self.channel = Channel(ours)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=_keep_tail, args=(self._process.stdout, self._tail), daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:
            self.channel.close()
            with self._process:  # waits for its end
                self.kill()
            raise EngineError(f"no thread can be started for rank {rank}: {error}") from None

    def _start(self) -> socket.socket:
        """Our end of its channel."""
        ours, theirs = socket.socketpair()
        # -P: a file of the working directory named like a module of Python must not take its place.
        module = ("-P", "-m", "tailrace.engine.ranks.worker")
        command = (sys.executable, *module, str(self._driver), str(theirs.fileno()))
        with theirs:
            try:
                # A session of its own: Ctrl-C is the driver's, and what the worker starts can be killed with it.
                self._process = subprocess.Popen(
                    command,
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        return ours

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    def obituary(self) -> str:
        """How a process that hung up has died, and its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_LIMIT_S)
        end([self])
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        last = " ".join(lines[-_TAIL_LINES:])
        return f"{self._how()}; its last output: {last}" if last else self._how()

    def _how(self) -> str:
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        return signal.Signals(-code).name + (", out of memory?" if code == -signal.SIGKILL else "")

    def kill(self) -> None:
        """Kill it with all that it has started. From any thread; killing twice is harmless.

        A process that the driver has forked leaves it alone: what that one inherits is the driver's.
        """
        if os.getpid() != self._driver:
            return
        with self._killing:  # nobody reaps it meanwhile
            if not self._killed:  # later on, the group's number may be another's
                self._killed = True
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_LIMIT_S)
        self._reader.join(_REAP_LIMIT_S)


class Crew:
    """All worker processes of an engine, so that another thread can end them at any moment."""

    def __init__(self) -> None:
        self._workers: set[WorkerProcess] = set()
        self._changing = threading.Lock()
        self._interrupted = False

    def hire(self, rank: int) -> WorkerProcess:
        """Start a process for `rank`.

        Raises:
            EngineError: the machine has no room for another process, or the engine is being closed.
        """
        with self._changing:
            if self._interrupted:
                raise EngineError("the engine is being closed")
            worker = WorkerProcess(rank)
            self._workers.add(worker)
        return worker

    def end(self, workers: Sequence[WorkerProcess]) -> None:
        """End some of them. Ending twice is harmless."""
        with self._changing:
            self._workers.difference_update(workers)
        end(workers)

    def close(self) -> None:
        """End all. Closing twice is harmless."""
        with self._changing:
            workers = list(self._workers)
        self.end(workers)

    def interrupt(self) -> None:
        """Kill all, and start no other. From any thread."""
        with self._changing:
            self._interrupted = True
            for worker in self._workers:
                worker.kill()


def end(workers: Sequence[WorkerProcess]) -> None:
    """Kill the processes with all that they have started, and reap them. Ending twice is harmless.

    There is nothing to ask them for first: a rank holds nothing that outlives its process.
    """
    for worker in workers:
        worker.channel.close()
        worker.kill()
    for worker in workers:
        worker._reap()


def _keep_tail(output: IO[bytes], tail: bytearray) -> None:
    with output:
        while chunk := os.read(output.fileno(), 65536):
            tail += chunk
            del tail[:-_TAIL_BYTES]
