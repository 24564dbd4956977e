"""Ends a Ray whose driver was killed: `python -m tailrace.cluster.cleanup MARK DIRECTORY`, started by RayProcess.

Most of a local Ray ends with its driver, but some of its helpers stay for a minute. The cleanup process waits until the
driver hangs up its standard input. If the driver has written nothing before, every process that has MARK in its
environment or writes below DIRECTORY is killed, and DIRECTORY is removed. The driver itself is not killed: it may be
ending with an error, and is waited for. Then the sockets and the shared memory of dead processes on this machine are
removed: those of the run are among them.
"""

import os
import shutil
import subprocess
import sys
import time
from subprocess import DEVNULL, PIPE

import psutil

from tailrace.cluster.environment import environment
from tailrace.host.children import python_module
from tailrace.host.descendants import kill_all, living

MARK = "TAILRACE_RAY"
"""The environment variable that marks all processes of a local Ray, and the processes that they start."""
_LIMIT_S = 30.0
"""Seconds for all killed processes to be gone, and for the driver to end. Killed processes are gone in a moment, but
Ray may start others meanwhile; a process stuck in the kernel is left alone."""

_LOOK_S = 0.1
"""Seconds between checks whether the driver has ended."""


def start(mark: str, directory: str) -> "subprocess.Popen[bytes]":
    """Start a cleanup process for the Ray of this driver. It ends when anything is written to its standard input."""
    command = (*python_module("tailrace.cluster.cleanup"), mark, directory)
    return subprocess.Popen(
        command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True, env=environment(os.environ)
    )


def clean_up(mark: str, directory: str, *, limit_s: float = _LIMIT_S) -> None:
    """Kill all processes that are left of a Ray, and remove its files and what killed workers have left.

    `limit_s`: seconds for the processes to be gone.
    """
    kill_all(lambda: _left(mark, directory), limit_s)
    shutil.rmtree(directory, ignore_errors=True)
    _remove_leftovers()


def main() -> None:
    """Wait until the driver has ended, and end its Ray."""
    mark, directory = sys.argv[1:]
    driver = os.getppid()
    if sys.stdin.buffer.read(1):
        return
    deadline = time.monotonic() + _LIMIT_S
    clean_up(mark, directory)
    while os.getppid() == driver and time.monotonic() < deadline:
        time.sleep(_LOOK_S)  # files that a living driver has open do not count as left behind
    _remove_leftovers()


def _remove_leftovers() -> None:
    # Imported only now: the cleanup process waits through a whole run, and should take little memory.
    from tailrace.transfer import shared_files, socket_directory
    from tailrace.transfer.weights.segments import SHARED

    socket_directory.remove_orphans()
    shared_files.remove_orphans(SHARED)


def _left(mark: str, directory: str) -> list[psutil.Process]:
    """Return the processes that have the mark, or write a file below `directory`.

    The mark alone is not enough: agents of Ray change their title, which overwrites part of the environment that the
    kernel shows.
    """

    def is_left(process: psutil.Process) -> bool:
        if process.environ().get(MARK) == mark:
            return True
        return any(file.path.startswith(f"{directory}/") and file.mode != "r" for file in process.open_files())

    return living(is_left)


if __name__ == "__main__":
    main()
