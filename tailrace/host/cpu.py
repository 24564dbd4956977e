"""The abilities of this machine's CPU, and the cores that this process may use."""

import functools
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The CPU's flags as in /proc/cpuinfo; empty without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags: Iterable[str] = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(iter(flags), "").split())


def cpu_name() -> str:
    """What the CPU is called, as in /proc/cpuinfo; without that file, its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def usable_cores() -> list[int]:
    """The cores that this process may use, ascending; all cores where the system does not bind processes to cores."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions to multiply bfloat16 (x86: AVX512-BF16, Arm: BF16).

    Without them PyTorch multiplies one bfloat16 at a time, many times slower than float32.
    """
    return not cpu_flags().isdisjoint({"avx512_bf16", "bf16"})
