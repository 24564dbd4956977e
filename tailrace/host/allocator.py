"""Keeps the memory of freed tensors in the process.

glibc returns large blocks to the operating system when they are freed. A training step frees and allocates the same
gigabytes again and again, so every page is faulted in and zeroed each time. On virtual machines the host takes back the
memory that the guest frees: there the first steps of a run have taken ten times as long as the rest for this reason
alone.
"""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, in one arena for all threads; return False without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_ARENA_MAX: 1}
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])
