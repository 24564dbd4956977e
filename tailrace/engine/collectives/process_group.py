"""The exchange through a torch.distributed process group: gloo between CPUs, nccl between GPUs."""

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # documented, but not in torch's __all__

from tailrace.engine.collectives.base import Collective
from tailrace.errors import EngineError, one_line

Backend = Literal["gloo", "nccl"]


class ProcessGroupCollective(Collective):
    """Exchanges in a process group of its own, beside any that the process has already.

    Sums are equal on all ranks; three ranks and more add in the backend's order, in the tensor's dtype. With nccl the
    exchange happens on the current stream, and torch ends a process whose peer is lost. nccl has never run between two
    GPUs.

    The constructor returns when all ranks have come. After that the store is not needed any more.

    Args:
        store: A file that does not exist yet, the same for all ranks.
        timeout_s: The longest that a rank waits for another. After that the group is of no further use.

    Raises:
        EngineError: a rank did not come in time.
    """

    def __init__(
        self, backend: Backend, rank: int, size: int, store: Path, timeout_s: float, device: torch.device
    ) -> None:
        self.rank, self.size = rank, size
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = self._make_group(store)
        except RuntimeError as error:
            raise self._failure(error) from error
        self.all_reduce(torch.zeros(1, device=device))  # nccl connects at the first exchange

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Collective`."""
        assert tensor.is_contiguous()
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise self._failure(error) from error

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        assert tensor.is_contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        try:
            self._group._allgather_base(gathered.flatten(), tensor.flatten()).wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        return gathered

    def close(self) -> None:
        """See `Collective`."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def _make_group(self, path: Path) -> Any:
        # torch's stubs know neither of the constructors that take options
        store = FileStore(str(path), self.size)
        store.set_timeout(self._timeout)
        options: Any
        if self._backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return ProcessGroupNCCL(store, self.rank, self.size, options)
        from torch.distributed import ProcessGroupGloo

        group: Any = ProcessGroupGloo
        options = group._Options()
        options._timeout = self._timeout
        options._devices = [group.create_device(hostname="127.0.0.1")]  # the ranks of a replica share a machine
        return group(store, self.rank, self.size, options)

    def _failure(self, error: RuntimeError) -> EngineError:
        return EngineError(
            f"an exchange over {self._backend} failed on rank {self.rank} of {self.size}, for another rank died, took "
            f"more than {self._timeout.total_seconds():g} s or made another call: {one_line(error)}"
        )
