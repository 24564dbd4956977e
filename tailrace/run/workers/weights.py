"""The sender of a run's weights, and the addresses at which its processes listen."""

from collections.abc import Sequence

import torch

from tailrace.config.run import RunConfig
from tailrace.events import EventLog
from tailrace.transfer.weights.address import LISTEN, PRIVATE
from tailrace.transfer.weights.media.factory import check_medium
from tailrace.transfer.weights.sender import WeightSender


def listen_at(config: RunConfig, address: str) -> Sequence[str]:
    """The addresses to listen at: on this machine, or at its `address` in a cluster that was joined."""
    return LISTEN if config.cluster.address is None else (PRIVATE, f"tcp://{address}:*")


def make_sender(config: RunConfig, *, address: str, datacentre: str, log: EventLog | None = None) -> WeightSender:
    """Make the sender of a run's weights, on the machine at `address`.

    Raises:
        ConfigError: this process cannot use the medium.
    """
    check_medium(config.weights.medium)
    return WeightSender(
        dtype=getattr(torch, config.wire_dtype),
        chunk_mib=config.weights.chunk_mib,
        datacentre=datacentre,
        listen=listen_at(config, address),
        log=log,
    )
