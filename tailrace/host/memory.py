"""The memory of this process and of the processes below it."""

import time
from collections.abc import Callable
from contextlib import suppress

import psutil

COST = 0.001
"""The part of the time that `shared_out` may take: the kernel visits every page of the processes for it."""


class ProcessMemory:
    """Measures this process together with all processes below it, such as the ranks of an engine."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._processes = [psutil.Process()]
        self._next = clock()

    def resident(self) -> int:
        """The resident bytes of the processes that `shared_out` saw last.

        A page that two processes share counts in both.
        """
        return sum(_of(process, lambda process: int(process.memory_info().rss)) for process in self._processes)

    def shared_out(self) -> int | None:
        """The proportional set size (PSS): a page that n processes share counts as an n-th of a page in each.

        None where the last answer is too recent (`COST`), and where the kernel does not say.
        """
        began = self._clock()
        if began < self._next:
            return None
        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        total = sum(_of(process, _proportional) for process in self._processes)
        ended = self._clock()
        self._next = ended + (ended - began) / COST
        return total or None


def take_peak(device: str) -> int | None:
    """The most bytes that this process's tensors had on a CUDA device since the last call; None elsewhere.

    PyTorch's allocator counts them. It knows nothing of CUDA's own memory, of NCCL's, and of other processes. The peak
    is 0 where this process has not used CUDA, as where all ranks are processes of their own.
    """
    if device.partition(":")[0] != "cuda":
        return None
    import torch  # slow: only where a worker has a GPU, and so has imported it

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0  # asking would begin to use CUDA here, or fail
    peak = int(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _proportional(process: psutil.Process) -> int:
    return int(getattr(process.memory_full_info(), "pss", 0))


def _of(process: psutil.Process, measure: Callable[[psutil.Process], int]) -> int:
    """Measure a process; 0 where it has ended, or is another user's."""
    with suppress(psutil.Error):
        return measure(process)
    return 0
