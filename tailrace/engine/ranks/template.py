"""The process that those of ranks are forked from: `python -m tailrace.engine.ranks.template DRIVER DESCRIPTOR`.

    driver                                template                             rank
    TemplateProcess.fork ──Fork─────────▶ imports torch once; fork ──────────▶ worker.serve
                         ◀─Forked──────
    ForkedProcess.wait   ──Reap─────────▶ waits for the end of its child
                         ◀─Reaped──────

To import PyTorch takes seconds of a core, and longer from a file system across a network; a fork takes milliseconds,
and its imported modules are in memory once for all ranks. Nothing is computed here, and no thread is started: a process
that has used a device or has threads cannot be forked safely.
"""

import errno
import gc
import os
import select
import socket
import sys
import time
from array import array
from contextlib import suppress

from tailrace.engine.ranks import worker
from tailrace.engine.ranks.wire import Channel, Fork, Forked, Reap, Reaped

_WATCH_MS = 1000
_REQUEST_LIMIT_S = 10.0
"""For the rest of a request that has begun."""
_LOOK_S = 0.005
"""Between looks whether a child has ended."""


def main() -> None:
    """Fork until the driver is gone; in what was forked, serve as a rank."""
    driver, descriptor = map(int, sys.argv[1:])
    template = os.getpid()
    gc.freeze()  # or every collection in a rank would copy the pages that it shares
    with Channel(socket.socket(fileno=descriptor)) as channel:
        try:
            request, descriptors = _forked(driver, channel)
        except (ConnectionError, TimeoutError):
            return
    become(request, descriptors)
    worker.serve(template, descriptors[0])


def _forked(driver: int, channel: Channel) -> tuple[Fork, "array[int]"]:
    """Answer requests. Returns in a forked process alone, with what was requested.

    Raises:
        ConnectionError, TimeoutError: the driver is gone.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        while not poll.poll(_WATCH_MS):
            if os.getppid() != driver:  # and a process that it forked holds its end
                raise ConnectionResetError("the driver is gone")
        request, descriptors = channel.receive_request(limit_s=_REQUEST_LIMIT_S)
        match request:
            case Fork():
                try:
                    pid = os.fork()
                except OSError as error:
                    answer = Forked(error=error.errno or errno.EAGAIN)
                else:
                    with suppress(ProcessLookupError, PermissionError):  # it has done so itself, or has ended
                        os.setpgid(pid, pid)  # so that it can be killed with its children from now on
                    if not pid:
                        return request, descriptors
                    answer = Forked(pid=pid)
                for descriptor in descriptors:
                    os.close(descriptor)
                channel.send(answer)
            case Reap(pid, limit_s):
                channel.send(Reaped(_reap(pid, limit_s)))


def _reap(pid: int, limit_s: float) -> int | None:
    """How the child has ended: its exit code, or less than 0 the signal. None if it has not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_S)


def become(request: Fork, descriptors: "array[int]") -> None:
    """Be as if the driver had started this process."""
    _, output, directory = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.fchdir(directory)
    os.close(output)
    os.close(directory)
    os.environb.clear()
    os.environb.update(request.environment)
    if request.cores:
        os.sched_setaffinity(0, request.cores)


if __name__ == "__main__":
    main()
