"""What all parts of Tailrace that start processes have in common: how they are started, ended and spoken of."""

import os
import signal
import sys
from contextlib import suppress

EXIT_LIMIT_S = 1.0
"""A process closes its sockets and pipes a moment before it exits; the exit code is worth the wait."""
KILL_LIMIT_S = 5.0
"""A killed process is gone in milliseconds; one stuck in the kernel is left to it."""


def python_module(name: str, *options: str) -> tuple[str, ...]:
    """The command that runs a module of Tailrace as a program. `options`: further ones of Python.

    With -P, a file of the working directory that is named like a module of Python does not take its place.
    """
    return sys.executable, *options, "-P", "-m", name


def kill_group(leader: int) -> None:
    """Kill all processes of the group that `leader` has made; nothing where it is gone or another user's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def last_output(text: str) -> str:
    """The last words of a process, to be put behind how it ended; empty where it said none."""
    return f"; its last output: {text}" if text else ""
