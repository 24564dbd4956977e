"""Chooses a medium."""

import torch
from torch import distributed

from tailrace.config.weights import WeightsMedium
from tailrace.errors import ConfigError
from tailrace.transfer.weights.media.base import Medium
from tailrace.transfer.weights.media.shared_memory import SharedMemoryMedium
from tailrace.transfer.weights.media.tcp import TcpMedium
from tailrace.transfer.weights.messages import Backend
from tailrace.transfer.weights.versions import StoredVersion


def backend_of(name: WeightsMedium) -> Backend | None:
    """The backend of the process group that versions are broadcast in; None for a medium without broadcasts."""
    return name if name == "gloo" or name == "nccl" else None


def check_medium(name: WeightsMedium) -> None:
    """Check that this process can use the medium.

    Raises:
        ConfigError: it cannot be used here.
    """
    if name == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "weights.medium=nccl is for trainers and engines with CUDA devices, and this process has none; "
            "use auto or gloo"
        )
    if (backend := backend_of(name)) and not distributed.is_backend_available(backend):
        raise ConfigError(f"weights.medium={name} needs a torch with {backend}, which this one is not; use auto")


def is_mapped(name: WeightsMedium, *, same_host: bool) -> bool:
    """Whether a parent's memory is read in place rather than copied. `same_host`: memory can be shared with it."""
    return name == "shared_memory" or (name == "auto" and same_host)


def make_medium(stored: StoredVersion, *, mapped: bool, retry_s: float) -> Medium:
    """The medium for chunks that are not broadcast. `mapped`: the version lies in the parent's memory."""
    return SharedMemoryMedium(stored) if mapped else TcpMedium(stored, retry_s=retry_s)
