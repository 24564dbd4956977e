"""Private directories that do not outlive their processes, and files in them that several processes map as memory.

A process holds a lock on its directory for as long as it lives. Unlike a process id, a lock shows across containers,
and is not mistaken for that of a newer process. So a directory that a killed process has left is known, and the next
process that makes one there removes it.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

MEMORY_PREFIX = "tailrace-queue-"
"""Begins the names of directories with shared memory: the queue's, and the weights'."""


def make_directory(parent: Path) -> tuple[Path, int]:
    """A private directory for shared memory, and its locked descriptor.

    Raises:
        OSError: it cannot be made.
    """
    return lock_new(Path(tempfile.mkdtemp(prefix=f".{MEMORY_PREFIX}{os.getpid()}-", dir=parent)))


def lock_new(unnamed: Path) -> tuple[Path, int]:
    """Lock a new private directory whose name begins with a dot, and take the dot away; its new path and the lock.

    It gets its name when it is locked, so nobody takes it for one that was left.

    Raises:
        OSError: its file system does not keep it private.
    """
    lock = lock_directory(unnamed)
    if lock is None:
        raise PermissionError(errno.EPERM, "a new directory is not this user's alone", str(unnamed))
    return unnamed.rename(unnamed.with_name(unnamed.name[1:])), lock


def lock_directory(directory: Path) -> int | None:
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


def remove_orphans(parent: Path, prefix: str = MEMORY_PREFIX) -> None:
    """Remove the directories in `parent` whose names begin with `prefix`, where this user's process died with them."""
    for directory in parent.glob(f"{prefix}*"):
        lock = lock_directory(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def make_file(path: Path, size: int) -> int:
    """The descriptor of a new file of `size` bytes, which all have their place in memory or on the disk.

    Raises:
        OSError: there is no room for it, or a file of that name. No new file is left.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def map_new(path: Path, size: int) -> memoryview:
    """Make a file, and map it as a whole.

    Raises:
        OSError: there is no room for it. No new file is left.
    """
    file = make_file(path, size)
    try:
        return map_file(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def map_file(file: int, *, at_once: bool = True) -> memoryview:
    """Map a whole file, with all of its pages. It is unmapped when the last view of it goes.

    `at_once`: by one call of the kernel, which is quick and stops the other threads of this process.

    Raises:
        OSError: there is no room for it.
        ValueError: the file is empty.
    """
    if at_once:
        return memoryview(mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    memory = memoryview(mmap.mmap(file, 0))
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
    return memory
