"""The directory of a queue's sockets, which only its user may enter.

Whoever serves the queue holds a lock on it. So one that a killed process has left is known, and the next queue that is
started on the host removes it, if nobody did before.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tailrace.errors import QueueError
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
    directory, lock = _make() if again is None else _take(again)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # ZeroMQ removes its own sockets, now or later
        os.close(lock)


def directory_of(endpoints: Sequence[str]) -> Path | None:
    """That of the sockets among `endpoints`; None where it is none that this module has made."""
    paths = [Path(endpoint.removeprefix("ipc://")) for endpoint in endpoints if endpoint.startswith("ipc://")]
    return next((path.parent for path in paths if path.parent.name.startswith(_PREFIX)), None)


def _make() -> tuple[Path, int]:
    """A new one, and its locked descriptor. It gets its name when it is locked, so it is never an orphan."""
    unnamed = private_directory(f".{_PREFIX}")
    lock = _locked(unnamed)
    assert lock is not None, "nobody else knows it"
    return unnamed.rename(unnamed.with_name(unnamed.name[1:])), lock


def _take(directory: Path) -> tuple[Path, int]:
    for _ in range(_TRIES):
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = _locked(directory)
        if lock is not None:
            return directory, lock
        time.sleep(_PAUSE_S)
    raise QueueError(
        f"{directory}, where the queue listened before, is another process's or not this user's alone; "
        f"end that process, or remove the directory"
    )


def _locked(directory: Path) -> int | None:
    """The locked descriptor of a directory; None where it is not this user's alone, or another process has it."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None  # not a directory, not ours, or gone by now
    with suppress(BlockingIOError, FileNotFoundError):  # another process has it, or has removed it before this had it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        known = os.fstat(lock)
        is_private = known.st_uid == os.getuid() and not known.st_mode & 0o077
        if is_private and os.path.samestat(known, directory.stat()):
            return lock
    os.close(lock)
    return None


def remove_orphans() -> None:
    """Remove directories whose processes died without having done so."""
    for directory in socket_parent().glob(f"{_PREFIX}*"):
        lock = _locked(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
