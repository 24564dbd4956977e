"""The memory of the block KV cache."""

import math
from typing import Self

import torch

from tailrace.config.base import GIB
from tailrace.config.engine import NativeEngineConfig
from tailrace.errors import ConfigError
from tailrace.models.architecture import Architecture

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The dtypes, by their names in configurations."""


_ALIGNMENT = 64
"""Bytes: a cache line."""


class KVCache:
    """Keys and values of every block: `data` [layers, 2, blocks, kv_heads, block_size * head_dim].

    The decoder chooses how the vectors of a block and head are laid out in the last dimension. The memory is zeroed at
    first: masked attention also reads what was never written, which must be finite.

    Each layer has a region of the memory, of the same size whatever the shape of a block. So a cache of another shape
    can take the place of this one layer by layer. What it never writes is an old key or value, finite as well.
    """

    def __init__(
        self, architecture: Architecture, regions: torch.Tensor, *, region_bytes: int, block_size: int
    ) -> None:
        """Make a cache in this memory. `architecture` is the rank's own (`sharding.local_architecture`).

        Args:
            regions: [layers, elements].
            region_bytes: The bytes of a region that count; it may be longer, so that the next one is aligned.

        Raises:
            ConfigError: a region cannot hold a block.
        """
        a = architecture
        blocks = region_bytes // region_block_bytes(a, block_size, regions.dtype)
        if blocks < 1:
            raise ConfigError(
                f"the KV cache has no room for a block of {block_size} tokens with {a.kv_heads} KV heads; "
                "raise engine.kv_cache_gib"
            )
        shape = (2, blocks, a.kv_heads, block_size * a.head_dim)
        self.data = regions[:, : math.prod(shape)].view(-1, *shape)
        self.block_size = block_size
        self._regions = regions
        self._region_bytes = region_bytes

    @classmethod
    def allocate(
        cls, architecture: Architecture, *, region_bytes: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Make a cache in memory of its own.

        Raises:
            ConfigError: a region cannot hold a block, or the device has no room for all.
        """
        layers, aligned = architecture.layers, -(-region_bytes // _ALIGNMENT) * _ALIGNMENT
        try:
            regions = torch.zeros(layers, aligned // dtype.itemsize, dtype=dtype, device=device)
        except RuntimeError as error:  # CUDA's OutOfMemoryError is one, too
            gib = layers * aligned / GIB
            raise ConfigError(f"{device} has no {gib:.1f} GiB for the KV cache; lower engine.kv_cache_gib") from error
        return cls(architecture, regions, region_bytes=region_bytes, block_size=block_size)

    @property
    def blocks(self) -> int:
        """The number of blocks of each layer."""
        return self.data.shape[2]

    def reshaped(self, architecture: Architecture) -> "KVCache":
        """Make a cache for another shard of the model in the same memory. Layer by layer, each overwrites the other.

        Raises:
            ConfigError: a region cannot hold a block of it.
        """
        return KVCache(architecture, self._regions, region_bytes=self._region_bytes, block_size=self.block_size)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), in all layers, as if at the same moment."""
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            self.data[:, :, targets] = self.data[:, :, sources]


def blocks_that_fit(architecture: Architecture, *, gib: float, block_size: int, dtype: torch.dtype) -> int:
    """The number of blocks in a cache of `gib` GiB. `architecture` is the rank's own.

    Raises:
        ConfigError: not even one fits.
    """
    block_bytes = region_block_bytes(architecture, block_size, dtype)
    blocks = bytes_per_region(architecture, gib) // block_bytes
    if blocks < 1:
        least = math.ceil(architecture.layers * block_bytes / GIB * 1e6) / 1e6
        raise ConfigError(
            f"engine.kv_cache_gib {gib} holds no block of {block_size} tokens; raise it to {least:.6f} or more"
        )
    return blocks


def bytes_per_region(architecture: Architecture, gib: float) -> int:
    """The bytes of a layer's region in a cache of `gib` GiB."""
    return math.floor(gib * GIB) // architecture.layers


def region_block_bytes(architecture: Architecture, block_size: int, dtype: torch.dtype) -> int:
    """The bytes of a block in the region of one layer. `architecture` is the rank's own."""
    return 2 * architecture.kv_heads * block_size * architecture.head_dim * dtype.itemsize


def token_bytes(architecture: Architecture, dtype: torch.dtype) -> int:
    """The bytes of a token's keys and values in all layers."""
    return architecture.layers * region_block_bytes(architecture, 1, dtype)


def row_bytes(architecture: Architecture, config: NativeEngineConfig) -> int:
    """The bytes of the keys, or of the values, of a block of one KV head."""
    return config.block_size * architecture.head_dim * DTYPES[config.dtype].itemsize
