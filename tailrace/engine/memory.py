"""Memory of the machine: what is left of it, and where processes share files that lie in it."""

import os
from pathlib import Path

import psutil
import torch

MEMORY_BACKED = Path("/dev/shm")


def memory_backed(size: int = 0) -> Path | None:
    """The directory, if it is there and has room for `size` bytes; None stands for the one of temporary files."""
    if not os.access(MEMORY_BACKED, os.W_OK):
        return None
    room = os.statvfs(MEMORY_BACKED)
    return MEMORY_BACKED if room.f_bavail * room.f_frsize > size else None


def spare_bytes(device: torch.device, ranks: int) -> int:
    """What one of `ranks` that do the same may yet take: of its own device, or its share of the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available) // ranks
