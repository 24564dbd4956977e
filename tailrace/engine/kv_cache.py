"""The memory of the block KV cache."""

import math

import torch

from tailrace.engine.architecture import Architecture
from tailrace.errors import ConfigError

GIB = 2**30
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""What configurations call them."""


class KVCache:
    """Keys and values of every block: `data` [layers, 2, blocks, kv_heads, block_size * head_dim], contiguous.

    How the vectors of a block and head are laid out in the last dimension is the decoder's choice. Zeroed at first:
    what was never written is read by masked attention and must be finite.
    """

    def __init__(
        self, architecture: Architecture, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate it. `architecture`: the rank's own (`sharding.local_architecture`).

        Raises:
            ConfigError: the device has no room for it.
        """
        a = architecture
        shape = (a.layers, 2, blocks, a.kv_heads, block_size * a.head_dim)
        try:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # CUDA's OutOfMemoryError is one, too
            gib = math.prod(shape) * dtype.itemsize / GIB
            raise ConfigError(f"{device} has no {gib:.1f} GiB for the KV cache; lower engine.kv_cache_gib") from error
        self.block_size = block_size

    @property
    def blocks(self) -> int:
        return self.data.shape[2]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), in all layers, as if at the same moment."""
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            self.data[:, :, targets] = self.data[:, :, sources]


def blocks_that_fit(architecture: Architecture, *, gib: float, block_size: int, dtype: torch.dtype) -> int:
    """Blocks in `gib` GiB. `architecture`: the rank's own.

    Raises:
        ConfigError: not even one fits.
    """
    a = architecture
    block_bytes = a.layers * 2 * a.kv_heads * block_size * a.head_dim * dtype.itemsize
    blocks = int(gib * GIB) // block_bytes
    if blocks < 1:
        least = math.ceil(block_bytes / GIB * 1e6) / 1e6
        raise ConfigError(
            f"engine.kv_cache_gib {gib} holds no block of {block_size} tokens; raise it to {least:.6f} or more"
        )
    return blocks
