"""The communication groups that a rank belongs to, one for each TP degree that has been asked for.

A group is made when an arrangement of the ranks first needs it. It is kept, idle, for the next time (PAT, section 4.3).
The group of degree d has d neighbouring ranks: r // d · d, … for rank r.
"""

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.collectives.factory import make_collective
from tailrace.engine.collectives.rendezvous import Rendezvous
from tailrace.engine.model.shard import Shard
from tailrace.errors import EngineError


class Groups:
    """The communication groups of one rank. Not thread-safe."""

    def __init__(self, config: NativeEngineConfig, rank: int, *, device: torch.device, timeout_s: float) -> None:
        """Prepare to make groups; none is made yet.

        Args:
            rank: The rank's number among all ranks of the engine.
            timeout_s: The longest that a rank waits for another in an exchange.
        """
        self._config = config
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._collectives: dict[int, Collective] = {1: Alone()}

    def get(self, degree: int) -> Collective:
        """Return the group of this degree.

        Raises:
            EngineError: the group has not been made.
        """
        if degree not in self._collectives:
            raise EngineError(f"rank {self._rank} has no communication group of degree {degree}; add it first")
        return self._collectives[degree]

    def add(self, degree: int, rendezvous: Rendezvous) -> Collective:
        """Make the group with its other ranks, which do the same. Return when all have come.

        An earlier group of the same degree is closed: some of its ranks are other processes now.

        Raises:
            ConfigError: the configured collectives cannot run on this device.
            EngineError: a rank did not come in time, or the exchange cannot be set up.
        """
        former = self._collectives.pop(degree, None)
        if former is not None:
            former.close()
        shard = Shard(self._rank % degree, degree)
        made = make_collective(self._config, shard, self._device, rendezvous, self._timeout_s)
        self._collectives[degree] = made
        return made

    def close(self) -> None:
        """Close all groups. Closing twice is harmless."""
        for collective in self._collectives.values():
            collective.close()
