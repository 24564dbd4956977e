"""The driver's end of the template, from which rank processes are forked; see template.py.

A driver process has one template, from its first rank to its own end. A template that has died is replaced when the
next rank starts. No thread waits for the template while it holds a lock: a replica may be collected, and end its ranks,
at any moment.
"""

import atexit
import os
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, Pipe
from subprocess import DEVNULL, PIPE, STDOUT

from tailrace.engine.ranks.tail import Tail
from tailrace.engine.ranks.template import REQUEST
from tailrace.errors import how_ended
from tailrace.host.children import EXIT_LIMIT_S, KILL_LIMIT_S, kill_group, python_module

_TAKE_LIMIT_S = 10.0
"""Time for a request of one byte to find room in the socket."""


class ForkedProcess:
    """A process that the template forks, the leader of its own group. Callable from any thread."""

    def __init__(self, template: "TemplateProcess", pipe: Connection) -> None:
        self._template = template
        self._pipe = pipe
        self._said: list[int] = []
        """Numbers from the template: the pid (a negative error number if there is none), and how the process ended."""
        self._silent = False
        """Whether the process and the template have ended."""
        self._hearing = threading.Lock()

    @property
    def pid(self) -> int:
        """The pid; 0 as long as it is not known."""
        self._take()
        return max(self._said[0], 0) if self._said else 0

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        self._take()
        return self._silent or len(self._said) == 2

    def wait_for_pid(self, limit_s: float) -> int:
        """Wait for the pid, which comes as soon as the template has started. Return 0 if it does not come in time."""
        self._hear(limit_s, 1)
        return self.pid

    def wait(self, limit_s: float) -> bool:
        """Wait for the process to end. Return whether it did in time."""
        self._hear(limit_s, 2)
        return self.ended

    def how(self) -> str:
        """Say how the process ended."""
        match self._said:
            case [error, *_] if error < 0:
                return f"it could not be forked: {os.strerror(-error)}"
            case [_, code]:
                return how_ended(code)
        if self._silent:
            return f"the process that it was forked from has died: {self._template.cause_of_death()}"
        return "it has not ended yet"

    def kill(self) -> None:
        """Kill the process with all that it has started, if its pid is known."""
        if not self.ended and self.pid:  # an ended one was killed with its group, and its number may be another's
            kill_group(self.pid)

    def give_up(self) -> None:
        """End the template, which stands still: it has not even begun this process."""
        self._template.close()

    def _hear(self, limit_s: float, count: int) -> None:
        deadline = time.monotonic() + limit_s
        while not self._silent and len(self._said) < count and self._pipe.poll(max(0.0, deadline - time.monotonic())):
            self._take()

    def _take(self) -> None:
        with self._hearing:  # no thread waits in here
            while not self._silent and self._pipe.poll(0.0):
                try:
                    self._said.append(int(self._pipe.recv_bytes()))
                except (EOFError, ConnectionError):
                    self._silent = True


class TemplateProcess:
    """The template. Callable from any thread of the process that has started it."""

    def __init__(self) -> None:
        """Start the template.

        Raises:
            OSError: there is no room for another process, or another file.
            RuntimeError: there is no room for another thread.
        """
        self._requests, theirs = socket.socketpair()
        self._requests.settimeout(_TAKE_LIMIT_S)
        command = python_module("tailrace.engine.ranks.template", "-u")
        with theirs, ExitStack() as undo:
            undo.enter_context(self._requests)
            self._process = subprocess.Popen(
                (*command, str(os.getpid()), str(theirs.fileno())),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's
                # NumPy's library would start threads as soon as it is imported.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
            undo.callback(self._end)
            assert self._process.stdout is not None
            self._tail = Tail(self._process.stdout)
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The template's pid."""
        return self._process.pid

    @property
    def dead(self) -> bool:
        """Whether the template has ended."""
        return self._process.poll() is not None

    def fork(self, channel: int, output: int) -> ForkedProcess:
        """Fork a process, at once or when the template has started. It gets copies of these descriptors.

        It works in the directory in which the driver works now.

        Raises:
            OSError: there is no room for another file; or the template stands still, and has been killed.
        """
        heard, told = Pipe(duplex=False)
        with told:
            directory = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
            try:
                socket.send_fds(self._requests, [REQUEST], [channel, output, directory, told.fileno()])
            except TimeoutError:
                self.close()
                raise
            except ConnectionError:
                pass  # the template has just died: the process that is returned has ended, and says so
            finally:
                os.close(directory)
        return ForkedProcess(self, heard)

    def cause_of_death(self) -> str:
        """Say how the template has died, with its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_LIMIT_S)
        self._tail.finish(EXIT_LIMIT_S)
        return f"{how_ended(self._process.returncode)}{self._tail}"

    def close(self) -> None:
        """End the template; ranks that are left end, too. Closing twice is harmless."""
        self._requests.close()
        self._end()
        self._tail.finish(KILL_LIMIT_S)

    def _end(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_LIMIT_S)


_template: TemplateProcess | None = None
_starting = threading.Lock()


def fork(channel: int, output: int) -> ForkedProcess:
    """Fork a process from this process's template, which is started where there is none. See `TemplateProcess.fork`.

    Raises:
        OSError, RuntimeError: there is no room for another process, file or thread.
    """
    return _get().fork(channel, output)


def _get() -> TemplateProcess:
    global _template
    with _starting:
        if _template is not None and _template.dead:
            _template.close()
            _template = None
        if _template is None:
            _template = TemplateProcess()
        return _template


def _forget() -> None:
    """Drop the template, in a process that was forked from this one."""
    global _template, _starting
    _template, _starting = None, threading.Lock()


def _close() -> None:
    if _template is not None:
        _template.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close)
