"""The exchange of the ranks of one machine through memory that all of them map.

A gloo exchange between two processes takes 0.1 ms and more whatever its size, and a decode step has two for each layer.
Here a rank copies its part into shared memory, spins on the other ranks' counters, and sums: a few microseconds. The
protocol is in `kernels/shared_memory.cpp`.
"""

import ctypes
import functools
import mmap
import os
from pathlib import Path

import torch

from tailrace.engine.collectives.base import Collective, NativeExchange, address_of
from tailrace.engine.kernels import build
from tailrace.errors import EngineError

SLOT_BYTES = 256 * 1024
"""Longer tensors go in pieces of this size, which stay in a core's cache."""


class SharedMemoryCollective(Collective):
    """Sums in fp32 in the order of the ranks, also for bf16. Other threads run while it waits.

    The constructor returns when all ranks have come. The file is gone by then.

    Args:
        path: A file that does not exist yet, the same for all ranks, best in memory (`/dev/shm`).
        timeout_s: The longest that a rank waits for another. After that the exchange is of no further use.

    Raises:
        KernelUnavailable: the kernel cannot be compiled.
        EngineError: there is no room for the memory, or a rank did not come in time.
    """

    def __init__(self, rank: int, size: int, path: Path, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._kernel = kernel = load_kernel()
        self._memory = _map(path, exchange_bytes(size))
        self._start = ctypes.c_char.from_buffer(self._memory)
        self._exchange: int = kernel.exchange_open(
            ctypes.addressof(self._start), rank, size, SLOT_BYTES, self._timeout_s
        )
        self.native = NativeExchange(
            self._exchange, sum=address_of(kernel.exchange_sum_fp32), gather=address_of(kernel.exchange_gather)
        )
        self._sums = {torch.float32: kernel.exchange_sum_fp32, torch.bfloat16: kernel.exchange_sum_bf16}
        self.check(kernel.exchange_meet(self._exchange))
        if rank == 0:
            path.unlink()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Collective`."""
        assert self._exchange, "closed"
        assert tensor.is_contiguous()
        assert tensor.is_cpu
        self.check(self._sums[tensor.dtype](self._exchange, tensor.data_ptr(), tensor.numel()))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        assert self._exchange, "closed"
        assert tensor.is_contiguous()
        assert tensor.is_cpu
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self.check(self._kernel.exchange_gather(self._exchange, tensor.data_ptr(), gathered.data_ptr(), tensor.nbytes))
        return gathered

    def close(self) -> None:
        """See `Collective`."""
        if self._exchange:
            self._kernel.exchange_close(self._exchange)
            self._exchange = 0
            del self._start
            self._memory.close()

    def check(self, missing: int) -> None:
        """See `Collective`."""
        if missing >= 0:
            raise EngineError(
                f"rank {missing} of {self.size} did not take part in an exchange through shared memory within "
                f"{self._timeout_s:g} s: it died or is too slow"
            )


def exchange_bytes(size: int) -> int:
    """Bytes of the memory that `size` ranks share.

    Raises:
        KernelUnavailable: the kernel cannot be compiled.
    """
    count: int = load_kernel().exchange_bytes(size, SLOT_BYTES)
    return count


@functools.cache
def load_kernel() -> ctypes.CDLL:
    """Load the compiled exchange.

    Raises:
        KernelUnavailable: the kernel cannot be compiled.
    """
    kernel = build.load("shared_memory")
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    signatures = {
        "exchange_bytes": (long, integer, long),
        "exchange_open": (pointer, pointer, integer, integer, long, ctypes.c_double),
        "exchange_close": (None, pointer),
        "exchange_meet": (integer, pointer),
        "exchange_sum_fp32": (integer, pointer, pointer, long),
        "exchange_sum_bf16": (integer, pointer, pointer, long),
        "exchange_gather": (integer, pointer, pointer, pointer, long),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(kernel, name)
        function.restype, function.argtypes = result, arguments
    return kernel


def _map(path: Path, size: int) -> mmap.mmap:
    """Map the file at `path`, made if it is not there, as `size` bytes that are zero at first."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # no room is an error here, and not a SIGBUS at the first write
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EngineError(
            f"ranks cannot share {size / 2**20:.0f} MiB of memory at {path} ({error.strerror}); make room there or set "
            "engine.collectives=gloo"
        ) from None
