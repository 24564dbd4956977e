"""Weights on their way to rank processes: full tensors in a file that has no name.

The file lies in memory (/dev/shm) where there is room for it. It has no name: no place has to be agreed on, no other
process can open it, and it is gone with the last process that holds it, however that ends. Ranks get its descriptor
with the order to load. The driver keeps it open, because ranks that are made again need the weights again.
"""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import Self

import msgspec
import torch

from tailrace.config.base import GIB
from tailrace.engine.memory import MEMORY_BACKED, memory_backed
from tailrace.errors import EngineError

_ALIGNMENT = 64
"""Bytes: tensors begin at multiples of this, which suits vector instructions."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of a tensor in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """The offset in bytes."""


class StagedWeights(Mapping[str, torch.Tensor]):
    """Tensors in a nameless file, which is closed when this object is collected.

    They are memory-mapped on the CPU: a rank that takes a slice reads no more than that.
    """

    def __init__(self, descriptor: int, places: dict[str, Place]) -> None:
        """Take over the file's `descriptor`."""
        self.descriptor = descriptor
        self.places = places
        self._memory: mmap.mmap | None = None
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def write(cls, named: Mapping[str, torch.Tensor]) -> Self:
        """Write tensors of any device, one after the other.

        Raises:
            EngineError: there is no room for them.
        """
        places, size = _arrange(named)
        directory = memory_backed(size)
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                for name, tensor in named.items():
                    file.seek(places[name].offset)
                    file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
                file.flush()
                return cls(os.dup(file.fileno()), places)
        except OSError as error:
            hint = f"; make room there or in {MEMORY_BACKED}, or set TMPDIR" if error.errno != errno.EMFILE else ""
            raise EngineError(
                f"the weights for the engine's ranks, {size / GIB:.2f} GiB, cannot be written to "
                f"{directory or tempfile.gettempdir()}: {error.strerror}{hint}"
            ) from None

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self.places[name]
        if self._memory is None:
            # The mapping is private, since torch wants memory that it may write to. Nothing is written.
            self._memory = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY)
        count = torch.Size(place.shape).numel()
        dtype: torch.dtype = getattr(torch, place.dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place.offset).view(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _arrange(named: Mapping[str, torch.Tensor]) -> tuple[dict[str, Place], int]:
    """Lay out the tensors. Return their places, and the length of the file."""
    places, end = {}, 0
    for name, tensor in named.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        places[name] = Place(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
        end = offset + tensor.nbytes
    return places, end
