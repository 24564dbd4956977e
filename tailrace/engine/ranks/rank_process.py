"""The driver's end of one rank process."""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from tailrace.engine.ranks import template_process
from tailrace.engine.ranks.tail import Tail
from tailrace.engine.ranks.template_process import ForkedProcess
from tailrace.engine.ranks.wire import Channel
from tailrace.errors import EngineError
from tailrace.host.children import EXIT_LIMIT_S, KILL_LIMIT_S

_START_LIMIT_S = 300.0
"""Time for the template to import torch on a busy machine."""


class RankProcess:
    """A process that becomes a rank by its first order. Its output is kept to explain its death."""

    def __init__(self, rank: int) -> None:
        """Start the process.

        Raises:
            EngineError: the machine has no room for another process or thread.
        """
        self.rank = rank
        self._driver = os.getpid()
        try:
            self._process, self.channel, self._tail = _start()
        except OSError as error:
            raise EngineError(f"no process can be started for rank {rank}: {error.strerror or error}") from None
        except RuntimeError as error:
            raise EngineError(f"no thread can be started for rank {rank}: {error}") from None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self._process.pid})"

    @property
    def pid(self) -> int:
        """The pid; 0 if there is no process. Waits for it while the template starts."""
        return self._process.wait_for_pid(_START_LIMIT_S)

    def cause_of_death(self) -> str:
        """Say how a process that hung up has died, with its last words."""
        self._process.wait(EXIT_LIMIT_S)
        end([self])
        return f"{self._process.how()}{self._tail}"

    def kill(self) -> None:
        """Kill the process with all that it has started. Callable from any thread; killing twice is harmless.

        In a process that the driver has forked, do nothing: the rank processes that it inherits are the driver's.
        """
        if os.getpid() == self._driver:
            self._process.kill()
            self.channel.hang_up()  # for a process that is yet to be forked, or was stopped

    def _reap(self) -> None:
        if os.getpid() == self._driver:
            if not self._process.wait(KILL_LIMIT_S) and not self._process.pid:
                self._process.give_up()
            self._tail.finish(KILL_LIMIT_S)


def _start() -> tuple[ForkedProcess, Channel, Tail]:
    """Start a process. Return it, our end of its channel, and its output.

    Raises: as `template_process.fork`.
    """
    with ExitStack() as theirs, ExitStack() as undo:
        ours, channel = socket.socketpair()
        theirs.enter_context(channel)
        undo.enter_context(ours)
        reading, writing = os.pipe()
        theirs.callback(os.close, writing)
        tail = Tail(os.fdopen(reading, "rb"))
        process = template_process.fork(channel.fileno(), writing)
        undo.pop_all()
    return process, Channel(ours), tail


class RankProcesses:
    """All rank processes of an engine, so that another thread can end them at any moment."""

    def __init__(self) -> None:
        self._processes: set[RankProcess] = set()
        self._changing = threading.Lock()
        self._interrupted = False

    def hire(self, rank: int) -> RankProcess:
        """Start a process for `rank`.

        Raises:
            EngineError: the machine has no room for another process, or the engine is being closed.
        """
        with self._changing:
            if self._interrupted:
                raise EngineError("the engine is being closed")
            process = RankProcess(rank)
            self._processes.add(process)
        return process

    def end(self, processes: Sequence[RankProcess]) -> None:
        """End these processes. Ending twice is harmless."""
        with self._changing:
            self._processes.difference_update(processes)
        end(processes)

    def close(self) -> None:
        """End all processes. Closing twice is harmless."""
        with self._changing:
            processes = list(self._processes)
        self.end(processes)

    def interrupt(self) -> None:
        """Kill all processes, and start no other. Callable from any thread."""
        with self._changing:
            self._interrupted = True
            for process in self._processes:
                process.kill()


def end(processes: Sequence[RankProcess]) -> None:
    """Kill the processes with all that they have started, and reap them. Ending twice is harmless.

    There is nothing to ask them first: a rank holds nothing that outlives its process.
    """
    for process in processes:
        process.kill()
        process.channel.close()
    for process in processes:
        process._reap()
