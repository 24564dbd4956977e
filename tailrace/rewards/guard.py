"""The parent of a grading process. It ends every process that the grader has started, however hidden.

    pool ── pipes ── guard ──▶ worker ──▶ processes that its grader starts

On Linux, orphans among the guard's descendants become its children, so that it also finds a program that became a
daemon. When the worker ends, when the pool asks (SIGTERM), or when the pool is gone, the guard kills all descendants
and ends as the worker has. The guard runs none of the user's code, so it cannot hang.
"""

import os
import resource
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tailrace.host.descendants import adopt_orphans, kill_descendants, signal_at_end_of_parent

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


def fork_worker(requests_fd: int) -> None:
    """Return in a new process, the worker. This process guards it to its end, and does not return.

    `requests_fd`: the pipe of requests, which hangs up when the pool is gone.
    """
    news, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    adopt_orphans()
    signal_at_end_of_parent(signal.SIGTERM)
    if worker := os.fork():
        _guard(worker, news, requests_fd)
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.close(news)
    os.close(wake)
    signal_at_end_of_parent(signal.SIGKILL)
    with suppress(OSError):  # there is none outside of Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, kill the grader, not the trainer


def _guard(worker: int, news: int, requests_fd: int) -> NoReturn:
    code = _ended(worker, news, requests_fd)
    kill_descendants()
    if code is not None and code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    how = signal.SIGTERM if code is None else -code
    with suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(how, signal.SIG_DFL)
    os.kill(os.getpid(), how)
    os._exit(1)


def _ended(worker: int, news: int, requests_fd: int) -> int | None:
    """Wait until the worker ends, and return its exit code; return None if it is to be ended."""
    poll = select.poll()
    poll.register(news, select.POLLIN)
    poll.register(requests_fd, 0)  # reports a hang-up and nothing else: the requests are the worker's
    while True:
        ready = dict(poll.poll())
        if requests_fd in ready or signal.SIGTERM in os.read(news, 512):
            return None
        while ended := _reaped():
            if ended[0] == worker:
                return os.waitstatus_to_exitcode(ended[1])


def _reaped() -> tuple[int, int] | None:
    """The next child that has ended, perhaps an orphan, with its status; None if none has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None
