"""What the CPU of this machine can do."""

import functools
from collections.abc import Iterable
from pathlib import Path


@functools.cache
def cpu_flags() -> frozenset[str]:
    """In the words of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags: Iterable[str] = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(iter(flags), "").split())


def multiplies_bfloat16() -> bool:
    """Whether it has instructions for it (x86: AVX512-BF16, Arm: BF16). Without, bfloat16 is many times slower than
    float32: PyTorch multiplies one number at a time."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "bf16"})
