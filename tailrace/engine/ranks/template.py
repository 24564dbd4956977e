"""The process that rank processes are forked from: `python -m tailrace.engine.ranks.template DRIVER DESCRIPTOR`.

    driver                            template                          rank
    TemplateProcess.fork ──socket───▶ imports torch once; fork ───────▶ rank_server.serve
    ForkedProcess        ◀──pipe───── its pid, and later how it ended

Importing PyTorch takes seconds of a core, and longer from a file system across a network. A fork takes milliseconds,
and the imported modules are in memory once for all ranks. Nothing is computed here, and no thread is started: a process
that has used a device or has threads cannot be forked safely.

A request is one byte with four descriptors: the rank's end of its channel, its output, its working directory, and the
pipe that tells how it ends. The rank keeps that pipe open, too: it is closed when both are gone.
"""

import errno
import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from tailrace.engine.ranks import rank_server
from tailrace.host.children import kill_group
from tailrace.host.streams import replace_unencodable

REQUEST = b"f"
DESCRIPTORS = 4
_WATCH_MS = 1000


def main() -> None:
    """Fork until the driver is gone. In a process that was forked, serve as a rank."""
    replace_unencodable()
    driver, descriptor = map(int, sys.argv[1:])
    template = os.getpid()
    gc.freeze()  # or every collection in a rank would copy the pages that it shares
    with socket.socket(fileno=descriptor) as requests:
        descriptors = Template(driver, requests).serve()
    if not descriptors:
        return
    channel, output, directory, _ = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.fchdir(directory)
    os.close(output)
    os.close(directory)
    rank_server.serve(template, channel)


class Template:
    """Forks ranks, and reports how each has ended."""

    def __init__(self, driver: int, requests: socket.socket) -> None:
        self._driver = driver
        self._requests = requests
        self._children: dict[int, Connection] = {}
        """The pipe of each child, by its pid."""

    def serve(self) -> list[int]:
        """Fork until the driver is gone; return no descriptors. In a forked process, return those of its request."""
        woken, waking = socket.socketpair()
        with woken, waking:
            for end in (woken, waking):
                end.setblocking(False)
            signal.set_wakeup_fd(waking.fileno())
            signal.signal(signal.SIGCHLD, lambda *_: None)  # only a signal with a handler wakes the poll
            poll = select.poll()
            for end in (self._requests, woken):
                poll.register(end, select.POLLIN)
            while True:
                ready = [number for number, _ in poll.poll(_WATCH_MS)]
                if woken.fileno() in ready:
                    woken.recv(4096)
                self._reap()
                if self._requests.fileno() in ready:
                    request, descriptors, _, _ = socket.recv_fds(
                        self._requests, len(REQUEST), DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
                    if not request or self._fork(descriptors):
                        return descriptors
                elif os.getppid() != self._driver:  # a process that the driver forked may still hold its end
                    return []

    def _fork(self, descriptors: list[int]) -> bool:
        """Fork a process. Return whether this is the new one."""
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for others in self._children.values():
                others.close()
            return True
        if pid > 0:
            with suppress(ProcessLookupError, PermissionError):  # it has ended
                os.setpgid(pid, pid)  # so that it can be killed with its children from now on
        *rest, pipe = descriptors
        for descriptor in rest:
            os.close(descriptor)
        telling = Connection(pipe, readable=False)
        _tell(telling, pid)
        if pid > 0:
            self._children[pid] = telling
        return False

    def _reap(self) -> None:
        """Report the children that have ended, and end what they have started."""
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)  # no other process can have its number yet
            _, status = os.waitpid(pid, 0)
            with self._children.pop(pid) as telling:
                _tell(telling, os.waitstatus_to_exitcode(status))


def _tell(telling: Connection, number: int) -> None:
    with suppress(OSError):  # the driver has closed its end
        telling.send_bytes(str(number).encode())


if __name__ == "__main__":
    main()
