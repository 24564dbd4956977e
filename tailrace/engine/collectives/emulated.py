"""A slower link between ranks, emulated for experiments."""

import ctypes
import time

import torch

from tailrace.config.base import GIB
from tailrace.config.engine import LinkConfig
from tailrace.engine.collectives.base import Collective, NativeExchange, address_of
from tailrace.engine.kernels import build


class _Link(ctypes.Structure):
    """The struct of `kernels/link.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("exchange", "sum", "gather")),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("latency_ns", "ns_per_byte")),
    ]


class EmulatedLink(Collective):
    """Slows another collective down: after each exchange the rank waits for latency + bytes / bandwidth.

    bytes is the size of an exchange on one rank: the tensor in `all_reduce`; in `all_gather` the tensors that the rank
    receives from the others. The wait spins, so it is as long as asked to within a microsecond or so. It is in C++
    where the other collective has a native exchange.
    """

    def __init__(self, collective: Collective, link: LinkConfig) -> None:
        """Slow `collective` down.

        Raises:
            KernelUnavailable: `collective` has a native exchange, and the C++ that waits cannot be compiled.
        """
        self.rank, self.size = collective.rank, collective.size
        self._collective = collective
        self._latency_ns = link.latency_us * 1e3
        self._ns_per_byte = 1e9 / (link.bandwidth_gib_per_s * GIB)
        self._link: _Link | None = None  # C++ keeps its address
        if (native := collective.native) is not None:
            self._link = _Link(
                native.exchange, native.sum, native.gather, self.size, self._latency_ns, self._ns_per_byte
            )
            kernel = build.load("link")
            self.native = NativeExchange(
                ctypes.addressof(self._link), sum=address_of(kernel.link_sum), gather=address_of(kernel.link_gather)
            )

    def check(self, missing: int) -> None:
        """See `Collective`."""
        self._collective.check(missing)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Collective`."""
        self._collective.all_reduce(tensor)
        self._wait(tensor, tensor.nbytes)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        gathered = self._collective.all_gather(tensor)
        self._wait(tensor, tensor.nbytes * (self.size - 1))
        return gathered

    def close(self) -> None:
        """See `Collective`."""
        self._collective.close()

    def _wait(self, tensor: torch.Tensor, received: int) -> None:
        if tensor.is_cuda:  # on CUDA an exchange has only been queued so far
            torch.cuda.current_stream(tensor.device).synchronize()
        end = time.perf_counter_ns() + self._latency_ns + received * self._ns_per_byte
        while time.perf_counter_ns() < end:
            pass
