"""The parent of a worker: `python -m tailrace.cluster.guard LIFELINE COMMAND...`, started by WorkerProcess.

    keeper ── lifeline (a socket) ── guard ──▶ worker ──▶ what it starts

The guard sends the worker's pid over the lifeline, and later the worker's exit code. When the worker ends, or the
keeper hangs up or is gone in any way, all descendants of the guard are killed. None can escape: the kernel makes the
guard the parent of orphans among them. The guard does nothing else, so that it cannot hang.
"""

import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress

from tailrace.host.children import KILL_LIMIT_S
from tailrace.host.descendants import adopt_orphans, kill_descendants


def main() -> None:
    """Start the worker, wait until it has ended, and kill all that is left of it."""
    lifeline, *command, messages = sys.argv[1:]
    if os.fork():
        os._exit(0)  # Ray kills the children of a keeper that ends, and the guard has to live longer
    os.set_inheritable(int(lifeline), False)
    adopt_orphans()
    worker = subprocess.Popen([*command, str(os.getpid()), messages], pass_fds=[int(messages)]).pid
    threading.Thread(target=_end_with_keeper, args=(int(lifeline),), daemon=True).start()
    for descriptor in (1, 2, int(messages)):  # the keeper reads until the worker and its children have closed them
        os.close(descriptor)
    _tell(int(lifeline), worker)
    while (ended := os.wait())[0] != worker:
        pass  # an orphan
    kill_descendants()
    _tell(int(lifeline), os.waitstatus_to_exitcode(ended[1]))


def _tell(lifeline: int, number: int) -> None:
    with suppress(OSError):  # the keeper is gone
        os.write(lifeline, b"%d\n" % number)


def _end_with_keeper(lifeline: int) -> None:
    select.select([lifeline], [], [])  # the keeper sends nothing: readable means that it has hung up
    kill_descendants()
    time.sleep(KILL_LIMIT_S)  # the main thread sees the worker end
    os._exit(1)


if __name__ == "__main__":
    main()
