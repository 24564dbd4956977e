"""Private directories that are removed after their processes, and files in them that processes map as memory.

A process holds a lock on its directory for as long as it lives. Unlike a process id, a lock shows across containers,
and is never mistaken for that of a newer process. So the directory of a killed process can be recognized, and the next
process that makes a directory there removes it.
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
"""The prefix of the names of directories with shared memory, of the queue and of the weights."""


def make_directory(parent: Path) -> tuple[Path, int]:
    """Make a private directory for shared memory. Return its path and its locked descriptor.

    Raises:
        OSError: the directory cannot be made.
    """
    return lock_new(Path(tempfile.mkdtemp(prefix=f".{MEMORY_PREFIX}{os.getpid()}-", dir=parent)))


def lock_new(unnamed: Path) -> tuple[Path, int]:
    """Lock a new private directory, and remove the dot that its name begins with. Return its new path and the lock.

    The directory gets its final name only when it is locked, so no process takes it for one that was left.

    Raises:
        OSError: the file system does not keep the directory private.
    """
    lock = lock_directory(unnamed)
    if lock is None:
        raise PermissionError(errno.EPERM, "a new directory is not this user's alone", str(unnamed))
    return unnamed.rename(unnamed.with_name(unnamed.name[1:])), lock


def lock_directory(directory: Path) -> int | None:
    """Lock a directory and return its descriptor; None where it is not private to this user, or is locked already."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None  # not a directory, not ours, or gone by now
    with suppress(BlockingIOError, FileNotFoundError):  # another process has it locked, or has removed it meanwhile
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        known = os.fstat(lock)
        is_private = known.st_uid == os.getuid() and not known.st_mode & 0o077
        if is_private and os.path.samestat(known, directory.stat()):
            return lock
    os.close(lock)
    return None


def remove_orphans(parent: Path, prefix: str = MEMORY_PREFIX) -> None:
    """Remove this user's directories in `parent` whose names begin with `prefix` and whose processes have died."""
    for directory in parent.glob(f"{prefix}*"):
        lock = lock_directory(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def make_file(path: Path, size: int) -> int:
    """Make a file of `size` bytes, all of them allocated in memory or on the disk, and return its descriptor.

    Raises:
        OSError: there is no room for the file, or there is one of that name. No new file is left.
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
    """Make a file of `size` bytes, and map it whole.

    Raises:
        OSError: there is no room for the file, or there is one of that name. No new file is left.
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
    """Map a whole file, with all of its pages. It is unmapped when the last view of it is deleted.

    `at_once`: map all pages with one call of the kernel, which is quick but stops the other threads of this process.

    Raises:
        OSError: there is no room for the mapping.
        ValueError: the file is empty.
    """
    if at_once:
        return memoryview(mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    memory = memoryview(mmap.mmap(file, 0))
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
    return memory
