"""Makes a rank's collective from its configuration."""

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.collectives.emulated import EmulatedLink
from tailrace.engine.collectives.process_group import ProcessGroupCollective
from tailrace.engine.collectives.rendezvous import Rendezvous
from tailrace.engine.collectives.shared_memory import SharedMemoryCollective, exchange_bytes, load_kernel
from tailrace.engine.kernels.build import KernelUnavailable
from tailrace.engine.model.shard import Shard
from tailrace.errors import ConfigError


def resolve_collectives(config: NativeEngineConfig, device: torch.device) -> NativeEngineConfig:
    """Return `config` with "auto" replaced. The driver calls this once, before it starts ranks, so that all agree.

    Raises:
        ConfigError: the configured collectives cannot run on this device.
    """
    on_cuda = device.type == "cuda"
    if config.collectives == "auto":
        return config.model_copy(update={"collectives": "nccl" if on_cuda else _best_on_cpu()})
    if on_cuda and config.collectives == "shared_memory":
        raise ConfigError(f"engine.collectives=shared_memory is for ranks on CPUs, not on {device}; use auto or nccl")
    if not on_cuda and config.collectives == "nccl":
        raise ConfigError(f"engine.collectives=nccl is for ranks on CUDA devices, not on {device}; use auto")
    return config


def meeting_bytes(config: NativeEngineConfig, degree: int) -> int:
    """Bytes of memory that `degree` ranks share. The collectives of `config` must be resolved."""
    return exchange_bytes(degree) if config.collectives == "shared_memory" else 0


def make_collective(
    config: NativeEngineConfig, shard: Shard, device: torch.device, rendezvous: Rendezvous, timeout_s: float
) -> Collective:
    """Make the collective of the rank that holds `shard`. Return when all ranks of the replica have come.

    Args:
        timeout_s: The longest that a rank waits for another, here and in each exchange.

    Raises:
        ConfigError: the configured collectives cannot run on this device.
        EngineError: a rank did not come in time, or the exchange cannot be set up.
    """
    if shard.degree == 1:
        return Alone()
    collective = _make(resolve_collectives(config, device), shard, device, rendezvous, timeout_s)
    return collective if config.link is None else EmulatedLink(collective, config.link)


def _make(
    config: NativeEngineConfig, shard: Shard, device: torch.device, rendezvous: Rendezvous, timeout_s: float
) -> Collective:
    rank, size = shard.index, shard.degree
    match config.collectives:
        case "shared_memory":
            return SharedMemoryCollective(rank, size, rendezvous.memory, timeout_s)
        case "gloo" | "nccl" as backend:
            return ProcessGroupCollective(backend, rank, size, rendezvous.store, timeout_s, device)
        case "auto":
            raise AssertionError("resolved before")


def _best_on_cpu() -> str:
    try:
        load_kernel()
    except KernelUnavailable:
        return "gloo"
    return "shared_memory"
