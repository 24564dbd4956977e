"""The directory of a queue's sockets, which only its user may enter; whoever serves there holds a lock on it."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import QueueError
from tailrace.transfer import shared_files
from tailrace.transfer.shared_files import lock_directory, lock_new
from tailrace.transfer.wire.sockets import private_directory, socket_parent

_PREFIX = "tailrace-ipc-"
_TRIES, _PAUSE_S = 20, 0.05
"""To lock a directory that another process may just be removing."""


@contextmanager
def socket_directory(again: Path | None = None) -> Iterator[Path]:
    """A new directory, or that of an earlier queue, `again`; removed in the end.

    Raises:
        QueueError: others may enter the earlier one, or another process has it; a new one cannot be made.
        OSError: the earlier one cannot be made.
    """
    remove_orphans()
    directory, lock = lock_new(private_directory(f".{_PREFIX}")) if again is None else _take(again)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # ZeroMQ removes its own sockets, now or later
        os.close(lock)


def directory_of(endpoints: Sequence[str]) -> Path | None:
    """That of the sockets among `endpoints`; None where it is none that this module has made."""
    paths = [Path(endpoint.removeprefix("ipc://")) for endpoint in endpoints if endpoint.startswith("ipc://")]
    return next((path.parent for path in paths if path.parent.name.startswith(_PREFIX)), None)


def _take(directory: Path) -> tuple[Path, int]:
    for _ in range(_TRIES):
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = lock_directory(directory)
        if lock is not None:
            return directory, lock
        time.sleep(_PAUSE_S)
    raise QueueError(
        f"{directory}, where the queue listened before, is another process's or not this user's alone; "
        f"end that process, or remove the directory"
    )


def remove_orphans() -> None:
    """Remove directories whose processes died without having done so."""
    shared_files.remove_orphans(socket_parent(), _PREFIX)
