"""The replica of an engine with one rank: no rank process, nothing on a wire."""

from collections.abc import Mapping, Sequence

import torch

from tailrace.engine.ranks.base import Replica
from tailrace.engine.ranks.rank import Rank
from tailrace.engine.scheduling.step import StepInput, StepOutput
from tailrace.types import CacheBytes


class LocalReplica(Replica):
    """One rank in this process. `finish` computes the step."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._step: StepInput | None = None

    @property
    def pids(self) -> list[int]:
        """See `Replica`."""
        return []

    def start(self, step: StepInput) -> None:
        """See `Replica`."""
        self._step = step

    def finish(self) -> StepOutput:
        """See `Replica`."""
        assert self._step is not None, "no step was started"
        step, self._step = self._step, None
        return self._rank.execute(step)

    def waitables(self) -> list[int]:
        """See `Replica`."""
        return []

    def read_cache(self, blocks: Sequence[int]) -> CacheBytes:
        """See `Replica`."""
        return self._rank.read_cache(blocks)

    def write_cache(self, blocks: Sequence[int], data: CacheBytes) -> None:
        """See `Replica`."""
        self._rank.write_cache(blocks, data)

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """See `Replica`."""
        self._rank.load(named)

    def settle(self) -> None:
        """See `Replica`."""

    def restart(self) -> None:
        """See `Replica`. This is never called, since a rank in this process does not die alone."""
        raise AssertionError("a rank in this process does not die alone")

    def close(self) -> None:
        """See `Replica`."""
