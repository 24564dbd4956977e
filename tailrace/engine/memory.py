"""Where processes of one machine share files that lie in memory."""

import os
from pathlib import Path

MEMORY_BACKED = Path("/dev/shm")


def memory_backed(size: int = 0) -> Path | None:
    """The directory, if it is there and has room for `size` bytes; None stands for the one of temporary files."""
    if not os.access(MEMORY_BACKED, os.W_OK):
        return None
    room = os.statvfs(MEMORY_BACKED)
    return MEMORY_BACKED if room.f_bavail * room.f_frsize > size else None
