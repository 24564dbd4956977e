"""Requests to the kernel about this process's descendants and its parent (on Linux; nothing elsewhere)."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from tailrace.host.children import KILL_LIMIT_S

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make orphans among the descendants of this process its children from now on, daemons included."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_end_of_parent(number: signal.Signals) -> None:
    """Have this process get the signal `number` when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """Initialize a process of a pool: it ends when its parent does, and at a Ctrl-C without a traceback.

    Else it waits for ever after a parent that was killed: each process holds the pipe open on which all of them read.
    """
    signal_at_end_of_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill_descendants() -> None:
    """Kill all descendants of this process; see `kill_all`."""
    kill_all(lambda: psutil.Process().children(recursive=True))


def kill_all(left: Callable[[], Sequence[psutil.Process]], limit_s: float = KILL_LIMIT_S) -> None:
    """Kill the processes that `left` finds until it finds none and all have ended, for at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    killed: list[psutil.Process] = []
    # the kernel frees a process's memory, by which `left` may know it, before the process has ended
    while (found := [*left(), *filter(_runs, killed)]) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):  # it has ended, or has become another user's
                process.kill()
        psutil.wait_procs(found, timeout=0.1)
        killed = found


def living(is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """The processes of this machine, except this one, for which `is_one` is true. They need not be descendants.

    A process that ends meanwhile, or that this user may not look at, does not count.
    """
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _is(process, is_one)]


def _is(process: psutil.Process, is_one: Callable[[psutil.Process], bool]) -> bool:
    with suppress(psutil.Error):
        return _runs(process) and is_one(process)
    return False


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
