"""Keeps the memory of freed tensors in the process.

glibc gives large blocks back to the operating system when they are freed, and a training step frees and allocates the
same gigabytes again and again: every page is faulted in and zeroed anew. On virtual machines, where the host takes back
what the guest frees, the first steps of a run were seen to take ten times as long as the rest for this reason alone.
"""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> bool:
    """Tell glibc to hold on to freed memory, in one arena for all threads; False where there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_ARENA_MAX: 1}
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])
