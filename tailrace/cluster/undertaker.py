"""Ends a Ray whose driver was killed: `python -m tailrace.cluster.undertaker MARK DIRECTORY`, started by RayConnection.

Most of a local Ray ends with its driver, but some of its helpers linger for a minute. This waits until the driver hangs
up its standard input. If it has not said before that all is well, every process that has MARK in its environment is
killed, and so is every process that writes below DIRECTORY, which is removed.
"""

import os
import shutil
import subprocess
import sys
from subprocess import DEVNULL, PIPE

import psutil

from tailrace.cluster.environment import environment

_MARK = "TAILRACE_RAY"


def start(mark: str, directory: str) -> "subprocess.Popen[bytes]":
    """An undertaker for the Ray that this process starts next. Writing anything to its input sends it away."""
    os.environ[_MARK] = mark
    command = (sys.executable, "-P", "-m", "tailrace.cluster.undertaker", mark, directory)
    return subprocess.Popen(
        command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True, env=environment(os.environ)
    )


def main() -> None:
    """Wait for the driver's end."""
    mark, directory = sys.argv[1:]
    if sys.stdin.buffer.read(1):
        return
    while marked := [process for process in psutil.process_iter() if _is_of(process, mark, directory)]:
        for process in marked:
            process.kill()
        psutil.wait_procs(marked, timeout=1.0)
    shutil.rmtree(directory, ignore_errors=True)


def _is_of(process: psutil.Process, mark: str, directory: str) -> bool:
    """Whether it has the mark, or writes a log below `directory`: agents of Ray change their title, and in doing so
    overwrite what the kernel shows of their environment, more or less of it.
    """
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(_MARK) == mark:
            return True
        return any(file.path.startswith(f"{directory}/") for file in process.open_files())
    except psutil.Error:  # it has ended, or is another user's
        return False


if __name__ == "__main__":
    main()
