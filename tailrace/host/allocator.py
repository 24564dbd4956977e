"""Keeps the memory of freed tensors in the process.

glibc returns large blocks to the operating system when they are freed. A training step frees and allocates the same
gigabytes again and again, so every page is faulted in and zeroed each time. On virtual machines the host takes back the
memory that the guest frees: there the first steps of a run have taken ten times as long as the rest for this reason
alone.
"""

import ctypes
import platform
from collections.abc import Mapping
from typing import NamedTuple


class _Setting(NamedTuple):
    parameter: int
    """Of mallopt(3)."""
    variable: str
    value: int


_SETTINGS = (
    _Setting(-4, "MALLOC_MMAP_MAX_", 0),
    _Setting(-1, "MALLOC_TRIM_THRESHOLD_", -1),
    _Setting(-8, "MALLOC_ARENA_MAX", 1),
)
KEPT_MEMORY: Mapping[str, str] = {setting.variable: str(setting.value) for setting in _SETTINGS}
"""Environment variables with which another program keeps its memory as `keep_freed_memory` lets this process."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, in one arena for all threads; return False without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(setting.parameter, setting.value) == 1 for setting in _SETTINGS])
