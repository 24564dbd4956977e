"""A slower link between ranks, emulated for experiments."""

import time

import torch

from tailrace.config.engine import LinkConfig
from tailrace.engine.collectives.base import Collective


class EmulatedLink(Collective):
    """Another collective, after each of whose exchanges the rank waits: latency + bytes / bandwidth.

    bytes is what an exchange is about on one rank: the tensor in `all_reduce`; in `all_gather` what the rank receives,
    the tensors of the other ranks. The wait spins, so that it is as long as asked to within a microsecond or so.
    """

    def __init__(self, collective: Collective, link: LinkConfig) -> None:
        self.rank, self.size = collective.rank, collective.size
        self.exchanges = 0
        """Calls so far."""
        self.bytes = 0
        """Of all exchanges so far, counted as above."""
        self._collective = collective
        self._latency_ns = link.latency_us * 1e3
        self._ns_per_byte = 1e9 / (link.bandwidth_gib_per_s * 2**30)

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
        if tensor.is_cuda:  # there an exchange has only been queued so far
            torch.cuda.current_stream(tensor.device).synchronize()
        end = time.perf_counter_ns() + self._latency_ns + received * self._ns_per_byte
        self.exchanges += 1
        self.bytes += received
        while time.perf_counter_ns() < end:
            pass
