"""The exchange between the TP ranks of one replica.

Every rank makes the same calls in the same order with tensors of the same shape and dtype. Results are equal bit for
bit on every rank, so ranks that compute the same from them stay in step.
"""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NativeExchange:
    """Functions for C++ to exchange without Python. They return -1, or the rank that did not come in time."""

    exchange: int
    """The first argument of both functions."""
    sum: int
    """Address of `int (void* exchange, float* data, int64_t count)`: all_reduce of fp32."""
    gather: int
    """Address of `int (void* exchange, const char* own, char* all, int64_t bytes)`: all_gather."""


def address_of(function: object) -> int:
    """The address of a function in a loaded library."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None, "a function that was loaded has an address"
    return address


class Collective(ABC):
    """The end of the exchange on one rank."""

    rank: int
    size: int
    native: NativeExchange | None = None
    """The exchange for C++ that exchanges many times in one call from Python; None where there is none."""

    def check(self, missing: int) -> None:
        """Raise the error that a `native` function has returned, if any.

        Raises:
            EngineError: `missing` is the number of a rank, which did not take part in time.
        """
        assert missing < 0, "a collective with a native exchange says more"

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor`, contiguous and of fp32 or bf16, by its sum over the ranks.

        Raises:
            EngineError: a rank did not take part in time.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks: [size, *tensor.shape], of any dtype.

        Raises:
            EngineError: a rank did not take part in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the exchange holds. Closing twice is harmless."""


class Alone(Collective):
    """The collective of a lone rank: nothing to exchange."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Collective`."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        return tensor[None]

    def close(self) -> None:
        """See `Collective`."""
