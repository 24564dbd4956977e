"""Common parts of starting processes, ending them and describing their end."""

import os
import signal
import sys
from contextlib import suppress

EXIT_LIMIT_S = 1.0
"""Seconds to wait for an exit code: a process closes its sockets and pipes a moment before it exits."""
KILL_LIMIT_S = 5.0
"""Seconds to wait for a killed process. It is gone in milliseconds, unless it is stuck in the kernel."""


def python_module(name: str, *options: str) -> tuple[str, ...]:
    """The command that runs a module of Tailrace as a program. `options`: further options of Python.

    With -P, a file of the working directory does not replace a Python module of the same name.
    """
    return sys.executable, *options, "-P", "-m", name


def kill_group(leader: int) -> None:
    """Kill all processes of the group that `leader` has made. Do nothing if it is gone or another user's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def last_output(text: str) -> str:
    """The last output of a process, to be appended to a text about its end; empty if there was none."""
    return f"; its last output: {text}" if text else ""
