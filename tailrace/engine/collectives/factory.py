"""Makes a rank's collective from its configuration."""

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.collectives.rendezvous import Rendezvous
from tailrace.engine.ranks.layout import Shard


def resolve_collectives(config: NativeEngineConfig, device: torch.device) -> NativeEngineConfig:
    """`config` with "auto" replaced. The driver calls it once, before it starts ranks, so that all of them agree.

    Raises:
        ConfigError: the configured collectives cannot run on this device.
    """
    raise NotImplementedError


def make_collective(
    config: NativeEngineConfig, shard: Shard, device: torch.device, rendezvous: Rendezvous, timeout_s: float
) -> Collective:
    """The collective of the rank that holds `shard`. Returns when all ranks of the replica have come.

    Args:
        timeout_s: The longest that a rank waits for another, here and in each exchange.

    Raises:
        ConfigError: the configured collectives cannot run on this device.
        EngineError: a rank did not come in time.
    """
    if shard.degree == 1:
        return Alone()
    raise NotImplementedError
