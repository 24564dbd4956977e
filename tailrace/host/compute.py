"""PyTorch in this process: its threads, its memory and its device."""

import time

import torch

from tailrace.errors import ConfigError
from tailrace.host.allocator import keep_freed_memory


def prepare_torch(device: str, threads: int | None) -> None:
    """Set torch's threads and memory for the whole process, and check that the device can be used.

    Raises:
        ConfigError: the device cannot be used.
    """
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ConfigError(f"device {device!r} cannot be used here: {reason}") from None


def now(device: torch.device) -> float:
    """The time in seconds, when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
