"""The directory of a queue's sockets. Only its user may enter it, and the process that serves there holds a lock."""

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
"""Attempts, and seconds between them, to lock a directory that another process may just be removing."""


@contextmanager
def socket_directory(again: Path | None = None) -> Iterator[Path]:
    """Make a new directory, or take `again`, the directory of an earlier queue; remove it when the block ends.

    Raises:
        QueueError: others may enter the earlier directory, another process has it, or a new one cannot be made.
        OSError: the earlier directory cannot be made.
    """
    remove_orphans()
    directory, lock = lock_new(private_directory(f".{_PREFIX}")) if again is None else _take(again)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # ZeroMQ removes its own sockets, now or later
        os.close(lock)


def directory_of(endpoints: Sequence[str]) -> Path | None:
    """The directory of the sockets among `endpoints`; None where this module did not make it."""
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
    """Remove the directories of processes that died without removing them."""
    shared_files.remove_orphans(socket_parent(), _PREFIX)
