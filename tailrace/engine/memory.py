"""The machine's memory: how much is available, and the directory for files in memory that processes share."""

import os
from pathlib import Path

import psutil
import torch

MEMORY_BACKED = Path("/dev/shm")


def memory_backed(size: int = 0) -> Path | None:
    """The directory for files in memory, if it has room for `size` bytes; None stands for that of temporary files."""
    if not os.access(MEMORY_BACKED, os.W_OK):
        return None
    room = os.statvfs(MEMORY_BACKED)
    return MEMORY_BACKED if room.f_bavail * room.f_frsize > size else None


def spare_bytes(device: torch.device, ranks: int) -> int:
    """Bytes that one of `ranks` equal ranks may still take: of its own device, or its share of the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch's own, to use again
        return int(free) + kept
    return int(psutil.virtual_memory().available) // ranks
