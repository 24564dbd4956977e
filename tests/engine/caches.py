"""KV caches with a given number of blocks."""

import torch

from tailrace.engine.kv_cache import KVCache, region_block_bytes
from tailrace.models.architecture import Architecture


def cache_of(
    architecture: Architecture, *, blocks: int, block_size: int, dtype: torch.dtype = torch.float32
) -> KVCache:
    """Allocate a cache on the CPU for the rank whose own architecture is `architecture`."""
    return KVCache.allocate(
        architecture,
        region_bytes=blocks * region_block_bytes(architecture, block_size, dtype),
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
