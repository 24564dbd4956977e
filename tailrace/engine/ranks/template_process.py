"""The driver's end of the template, from which the processes of ranks are forked: see template.py.

A driver process has one, from its first rank to its own end. One that has died is replaced when it is missed.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from subprocess import DEVNULL, PIPE, STDOUT
from typing import TypeVar

from tailrace.engine.ranks.tail import Tail, how_ended
from tailrace.engine.ranks.wire import Channel, Fork, Forked, Reap, Reaped

_START_LIMIT_S = 120.0
"""To import torch on a busy machine, and to answer the first request."""
_ANSWER_LIMIT_S = 10.0
"""Beyond what a request says."""
_EXIT_LIMIT_S = 1.0
"""It closes its socket a moment before it exits; the exit code is worth the wait."""
_END_LIMIT_S = 5.0
"""A killed process is gone in milliseconds; one stuck in the kernel is left to it."""

Reply = TypeVar("Reply", Forked, Reaped)


class TemplateDied(Exception):
    """It has ended, or does not answer and was killed."""


class ForkedProcess:
    """A process that the template has forked, the leader of a group of its own."""

    def __init__(self, template: "TemplateProcess", pid: int) -> None:
        self.pid = pid
        self._template = template
        self._waiting = threading.Lock()
        self._code: int | None = None

    def wait(self, limit_s: float) -> int | None:
        """Its exit code, or less than 0 the signal; None if it has not ended in time, or the template is gone."""
        with self._waiting:  # it can be reaped once
            if self._code is None:
                with suppress(TemplateDied):
                    self._code = self._template.reap(self.pid, limit_s)
            return self._code


class TemplateProcess:
    """The template. From any thread of the process that has started it."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            OSError: there is no room for another process, or another file.
            RuntimeError: there is none for another thread.
        """
        self.dead = False
        self._asking = threading.Lock()
        self._limit_s = _START_LIMIT_S
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        # -P: a file of the working directory named like a module of Python must not take its place.
        module = ("-P", "-m", "tailrace.engine.ranks.template")
        with theirs, ExitStack() as undo:
            undo.enter_context(self._channel)
            self._process = subprocess.Popen(
                (sys.executable, *module, str(os.getpid()), str(theirs.fileno())),
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

    def fork(self, channel: int, output: int) -> ForkedProcess:
        """A process as if this thread had started it now, of which the other ends of these descriptors are heard.

        Raises:
            OSError: there is no room for another process, or another file.
            TemplateDied: and there is none.
        """
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        directory = os.open(".", os.O_RDONLY)
        try:
            request = Fork(environment=dict(os.environb), cores=cores)
            forked = self._ask(Forked, request, (channel, output, directory), 0.0)
        finally:
            os.close(directory)
        if forked.error:
            raise OSError(forked.error, os.strerror(forked.error))
        return ForkedProcess(self, forked.pid)

    def reap(self, pid: int, limit_s: float) -> int | None:
        """How the process has ended; None if it has not in time.

        Raises:
            TemplateDied: nobody knows.
        """
        return self._ask(Reaped, Reap(pid, limit_s), (), limit_s).code

    def close(self) -> None:
        """End it; ranks that are left end, too. Closing twice is harmless."""
        self.dead = True
        self._channel.close()
        self._end()
        self._tail.finish(_END_LIMIT_S)

    def _ask(self, kind: type[Reply], request: Fork | Reap, descriptors: Sequence[int], limit_s: float) -> Reply:
        with self._asking:
            limit_s += self._limit_s
            try:
                self._channel.send(request, descriptors=descriptors, limit_s=limit_s)
                reply = self._channel.receive_reply(limit_s=limit_s)
            except OSError as error:
                how = f"killed after {limit_s:g} s without an answer"
                if not isinstance(error, TimeoutError):
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(_EXIT_LIMIT_S)
                    how = how_ended(self._process.returncode)
                self.close()
                raise TemplateDied(f"{how}{self._tail}") from None
            except BaseException:  # interrupted: the next request would get this one's reply
                self.close()
                raise
            self._limit_s = _ANSWER_LIMIT_S
        assert isinstance(reply, kind), "replies come in the order of the requests"
        return reply

    def _end(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)


_template: TemplateProcess | None = None
_starting = threading.Lock()


def fork(channel: int, output: int) -> ForkedProcess:
    """See `TemplateProcess.fork`; of this process's template, which is started where there is none.

    Raises:
        OSError, RuntimeError: there is no room for another process, file or thread.
        TemplateDied: twice.
    """
    try:
        return _get().fork(channel, output)
    except TemplateDied:  # perhaps long ago
        return _get().fork(channel, output)


def _get() -> TemplateProcess:
    global _template
    with _starting:
        if _template is None or _template.dead:
            _template = TemplateProcess()
        return _template


def _forget() -> None:
    """In a process that was forked from this one."""
    global _template, _starting
    _template, _starting = None, threading.Lock()


def _close() -> None:
    if _template is not None:
        _template.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close)
