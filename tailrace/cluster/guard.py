"""The parent of a worker: `python -m tailrace.cluster.guard LIFELINE COMMAND...`, started by WorkerProcess.

    keeper ── lifeline (a socket) ── guard ──▶ worker ──▶ what it starts

It says the worker's pid over the lifeline and, when that has ended, how. When the worker ends, or the keeper hangs up
or is gone in any way, everything below the guard is killed, wherever it hid: the kernel gives orphans among its
descendants to the guard. Nothing else is done here, so that nothing here can hang.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 5.0
"""A killed process is gone in milliseconds; one stuck in the kernel is left to it."""


def main() -> None:
    """Start the worker, wait for it, and leave nothing."""
    lifeline, *command, messages = sys.argv[1:]
    if os.fork():
        os._exit(0)  # Ray kills the children of a keeper that ends, and this has to live longer
    os.set_inheritable(int(lifeline), False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = subprocess.Popen([*command, str(os.getpid()), messages], pass_fds=[int(messages)]).pid
    threading.Thread(target=_end_with_keeper, args=(int(lifeline),), daemon=True).start()
    for descriptor in (1, 2, int(messages)):  # the keeper reads until the worker and its children have closed them
        os.close(descriptor)
    _tell(int(lifeline), worker)
    while (ended := os.wait())[0] != worker:
        pass  # an orphan
    _kill_descendants()
    _tell(int(lifeline), os.waitstatus_to_exitcode(ended[1]))


def _tell(lifeline: int, number: int) -> None:
    with suppress(OSError):  # the keeper is gone
        os.write(lifeline, b"%d\n" % number)


def _end_with_keeper(lifeline: int) -> None:
    select.select([lifeline], [], [])  # nothing is ever said over it: it was hung up
    _kill_descendants()
    time.sleep(_KILL_LIMIT_S)  # the main thread sees the worker end
    os._exit(1)


def _kill_descendants() -> None:
    deadline = time.monotonic() + _KILL_LIMIT_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for child in children:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or has become another user's
                os.kill(child.pid, signal.SIGKILL)
        psutil.wait_procs(children, timeout=0.1)


if __name__ == "__main__":
    main()
