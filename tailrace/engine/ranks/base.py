"""The ranks that hold one copy of the model, as the driver sees them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from tailrace.engine.scheduling.step import StepInput, StepOutput
from tailrace.errors import EngineError
from tailrace.types import CacheBytes


class RankDied(EngineError):
    """A rank process ended, or did not answer in time and was killed. The caches of its replica are lost."""


class Replica(ABC):
    """A copy of the model on TP ranks. One step at a time: `start`, then `finish`."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The pids of the rank processes, in the order of their ranks; empty where this process computes."""

    @abstractmethod
    def start(self, step: StepInput) -> None:
        """Hand the step to the ranks.

        Raises:
            RankDied: here or from `finish`.
        """

    @abstractmethod
    def finish(self) -> StepOutput:
        """Wait for the step's result.

        Raises:
            RankDied: a rank died or was too slow; `restart` makes new ones.
            EngineError: the step failed on a rank that lives, such as logits that are not finite.
        """

    @abstractmethod
    def waitables(self) -> list[int]:
        """File descriptors of the step under way. `finish` has something to say when one becomes readable.

        There are none where the step is computed inside `finish`.
        """

    @abstractmethod
    def read_cache(self, blocks: Sequence[int]) -> CacheBytes:
        """Return copies of the keys and values in these blocks, of all KV heads. No step may be under way.

        Raises:
            RankDied: a rank died.
        """

    @abstractmethod
    def write_cache(self, blocks: Sequence[int], data: CacheBytes) -> None:
        """Put keys and values of all KV heads into these blocks. No step may be under way.

        Raises:
            RankDied: a rank died.
        """

    @abstractmethod
    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights on every rank by these full, checked tensors. No step may be under way.

        Return when the ranks have been told to; `settle` waits for them, so that replicas load side by side.

        Raises:
            RankDied: here or from `settle`: a rank died on the way; `restart` makes new ones, with these weights.
            EngineError: there is no room to hand them over; the old weights stay.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until the ranks have been made and have loaded the weights that they were given.

        Raises:
            RankDied: a rank died on the way.
            ModelError, ConfigError, EngineError: a rank that lives reports this error.
        """

    @abstractmethod
    def restart(self) -> None:
        """Make all ranks again, with the weights that were loaded last and empty caches.

        Raises:
            RankDied: one of the new ranks has died already; this can be tried again.
            EngineError: the ranks cannot be made.
        """

    @abstractmethod
    def close(self) -> None:
        """End the ranks. Closing twice is harmless."""
