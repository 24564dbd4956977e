"""The ranks that hold one copy of the model, as the driver sees them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from tailrace.engine.scheduling.step import StepInput, StepOutput
from tailrace.errors import EngineError


class RankDied(EngineError):
    """A rank process ended, or did not answer in time and was killed. Caches of its replica are lost."""


class Replica(ABC):
    """A copy of the model on TP ranks. One step at a time: `start`, then `finish`."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Its rank processes, in the order of their ranks; empty where it computes in this process."""

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
        """File descriptors of the step under way: `finish` has something to say when one becomes readable.

        None where the step is computed inside `finish`.
        """

    @abstractmethod
    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights on every rank by these full, checked tensors. No step is under way.

        Returns when the ranks have been told to; `settle` waits for them, so that replicas load beside each other.

        Raises:
            RankDied: here or from `settle`: a rank died on the way; `restart` makes new ones, with these weights.
            EngineError: there is no room to hand them over; the old weights stay.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until the ranks have been made and have loaded what they were told to.

        Raises:
            RankDied: a rank died on the way.
            ModelError, ConfigError, EngineError: what a rank that lives says is wrong.
        """

    @abstractmethod
    def restart(self) -> None:
        """Make all ranks anew, with the weights that were loaded last and empty caches.

        Raises:
            RankDied: one of the new ones has died already; it can be tried again.
            EngineError: they cannot be made.
        """

    @abstractmethod
    def close(self) -> None:
        """End the ranks. Closing twice is harmless."""
