"""The block KV cache: who holds which block, and the memory behind it."""

import math

import numpy as np
import torch

from tailrace.engine.architecture import Architecture
from tailrace.errors import EngineError

GIB = 2**30


class BlockManager:
    """Counts the references to each block.

    Prompt blocks are taken from the high end and all others from the low end, so that the blocks of either kind lie
    close together and attention can read them as one slice, without gathering.
    """

    def __init__(self, blocks: int) -> None:
        self._references = np.zeros(blocks, np.int64)
        self._free = blocks

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        return self._free

    @property
    def used(self) -> int:
        return self.total - self._free

    def references(self, block: int) -> int:
        """Holders of `block`; 0 says that it is free."""
        return int(self._references[block])

    def allocate(self, count: int, *, prompt: bool) -> list[int]:
        """Take `count` free blocks with one reference each. There must be that many."""
        assert 0 <= count <= self._free, f"{count} blocks wanted, {self._free} free"
        free = np.flatnonzero(self._references == 0)
        taken = free[len(free) - count :][::-1] if prompt else free[:count]
        self._references[taken] = 1
        self._free -= count
        return [int(block) for block in taken]

    def share(self, blocks: list[int]) -> None:
        """Add a reference to each of these held blocks."""
        assert all(self._references[blocks] > 0), "a free block cannot be shared"
        self._references[blocks] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop a reference of each; blocks without any are free again."""
        assert all(self._references[blocks] > 0), "a free block cannot be released"
        self._references[blocks] -= 1
        self._free += int(np.count_nonzero(self._references[blocks] == 0))


class KVCache:
    """Keys and values of every block: [layers, 2, blocks, kv_heads, block_size, head_dim].

    Zeroed at first: what was never written is read by masked attention and must be finite.
    """

    def __init__(
        self, architecture: Architecture, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate it.

        Raises:
            EngineError: the device has no room for it.
        """
        a = architecture
        shape = (a.layers, 2, blocks, a.kv_heads, block_size, a.head_dim)
        try:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # CUDA's OutOfMemoryError is one, too
            gib = math.prod(shape) * dtype.itemsize / GIB
            raise EngineError(f"{device} has no {gib:.1f} GiB for the KV cache; lower kv_cache_gib") from error
        self.block_size = block_size

    @property
    def blocks(self) -> int:
        return self.data.shape[2]

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_size, head_dim], a view."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_size, head_dim], a view."""
        return self.data[layer, 1]

    def rows(self, slots_T: torch.Tensor) -> torch.Tensor:
        """[T * kv_heads], for `write`: where the vectors of tokens at slots (block * block_size + offset) lie."""
        heads = torch.arange(self.data.shape[3], device=slots_T.device)
        blocks, offsets = slots_T // self.block_size, slots_T % self.block_size
        return ((blocks[:, None] * len(heads) + heads) * self.block_size + offsets[:, None]).flatten()

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, [T, kv_heads, head_dim] each, at `rows`."""
        head_dim = self.data.shape[-1]
        for pool, new in ((self.keys(layer), k), (self.values(layer), v)):
            pool.view(-1, head_dim).index_copy_(0, rows, new.reshape(-1, head_dim))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), in all layers, as if at the same moment."""
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            self.data[:, :, targets] = self.data[:, :, sources]


def blocks_that_fit(architecture: Architecture, *, gib: float, block_size: int, dtype: torch.dtype) -> int:
    """Blocks in `gib` GiB.

    Raises:
        EngineError: not even one fits.
    """
    a = architecture
    block_bytes = a.layers * 2 * a.kv_heads * block_size * a.head_dim * dtype.itemsize
    blocks = int(gib * GIB) // block_bytes
    if blocks < 1:
        raise EngineError(
            f"kv_cache_gib {gib} holds no block of {block_size} tokens; raise it to {block_bytes / GIB:.6f} or more"
        )
    return blocks
