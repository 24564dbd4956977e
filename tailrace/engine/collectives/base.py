"""The exchange between the TP ranks of one replica.

Every rank makes the same calls in the same order with tensors of the same shape and dtype. Results are equal bit for
bit on every rank, so that ranks that compute the same from them stay in step.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NativeSum:
    """`all_reduce` of fp32 for C++: `int function(void* exchange, float* data, int64_t count)`."""

    function: int
    """Its address. It returns -1, or the rank that did not come in time."""
    exchange: int


class Collective(ABC):
    """One rank's end."""

    rank: int
    size: int
    native_sum: NativeSum | None = None
    """What C++ may call instead of `all_reduce`, many times in a call from Python; None where there is no such thing."""

    def check(self, missing: int) -> None:
        """Turn what `native_sum` has returned into an error.

        Raises:
            EngineError: it is the number of a rank, which did not take part in time.
        """
        assert missing < 0, "a collective with a native sum says more"

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor`, contiguous and of fp32 or bf16, by its sum over the ranks.

        Raises:
            EngineError: a rank did not take part in time.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks: [size, *tensor.shape], of any dtype.

        Raises:
            EngineError: a rank did not take part in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what the exchange holds. Closing twice is harmless."""


class Alone(Collective):
    """The only rank: nothing to exchange."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Collective`."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        return tensor[None]

    def close(self) -> None:
        """See `Collective`."""
