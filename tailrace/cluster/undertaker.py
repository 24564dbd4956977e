"""Ends a Ray whose driver was killed: `python -m tailrace.cluster.undertaker MARK DIRECTORY`, started by RayProcess.

Most of a local Ray ends with its driver, but some of its helpers linger for a minute. This waits until the driver hangs
up its standard input. If it has not said before that all is well, every process that has MARK in its environment is
killed, and so is every process that writes below DIRECTORY, which is removed. Not the driver, which may be ending with
an error of its own, and is waited for. The sockets and the shared memory that processes on this machine have left which
are dead are removed, too: those of the run are among them.
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
"""The variable that all processes of a local Ray, and what they start, have in their environment."""
_LIMIT_S = 30.0
"""Killed processes are gone in a moment, but Ray may start others meanwhile; one stuck in the kernel is left to it. For
the driver to end, too."""

_LOOK_S = 0.1
"""Between looks at whether the driver has ended."""


def start(mark: str, directory: str) -> "subprocess.Popen[bytes]":
    """An undertaker for the Ray of this driver. Writing anything to its input sends it away."""
    command = (*python_module("tailrace.cluster.undertaker"), mark, directory)
    return subprocess.Popen(
        command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True, env=environment(os.environ)
    )


def bury(mark: str, directory: str, *, limit_s: float = _LIMIT_S) -> None:
    """Kill what is left of a Ray, and remove its files."""
    kill_all(lambda: _left(mark, directory), limit_s)
    shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Wait for the driver's end."""
    mark, directory = sys.argv[1:]
    driver = os.getppid()
    if sys.stdin.buffer.read(1):
        return
    deadline = time.monotonic() + _LIMIT_S
    bury(mark, directory)
    while os.getppid() == driver and time.monotonic() < deadline:
        time.sleep(_LOOK_S)  # what it has still open is not taken for left
    _remove_leftovers()


def _remove_leftovers() -> None:
    # only now: who waits through a whole run should take little memory
    from tailrace.transfer import shared_files, socket_directory
    from tailrace.transfer.weights.segments import SHARED

    socket_directory.remove_orphans()
    shared_files.remove_orphans(SHARED)


def _left(mark: str, directory: str) -> list[psutil.Process]:
    """Those that have the mark, or write a log below `directory`: agents of Ray change their title, and in doing so
    overwrite what the kernel shows of their environment, more or less of it.
    """

    def is_left(process: psutil.Process) -> bool:
        if process.environ().get(MARK) == mark:
            return True
        return any(file.path.startswith(f"{directory}/") and file.mode != "r" for file in process.open_files())

    return living(is_left)


if __name__ == "__main__":
    main()
