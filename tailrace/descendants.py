"""What is asked of the kernel about the processes below this one and the one above it (Linux; elsewhere nothing is)."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILL_LIMIT_S = 5.0
"""A killed process is gone in milliseconds; one stuck in the kernel is left to it."""


def adopt_orphans() -> None:
    """From now on orphans among the descendants of this process become its children, daemons included."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_end_of_parent(number: signal.Signals) -> None:
    """From now on this process gets that signal when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def kill_descendants() -> None:
    """Kill everything below this process until nothing is left there, for `KILL_LIMIT_S` at most."""
    deadline = time.monotonic() + KILL_LIMIT_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for child in children:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or has become another user's
                os.kill(child.pid, signal.SIGKILL)
        psutil.wait_procs(children, timeout=0.1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
