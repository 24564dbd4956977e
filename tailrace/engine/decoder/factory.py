"""Makes a rank's decoder from the configuration."""

from dataclasses import dataclass

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder import cpu, model
from tailrace.engine.decoder.base import Decoder
from tailrace.engine.decoder.cpu import CpuDecoder, Packed, unsupported
from tailrace.engine.decoder.packing import Packing, RowMajor
from tailrace.engine.decoder.torch import TorchDecoder
from tailrace.engine.kv_cache import (
    DTYPES,
    KVCache,
    blocks_that_fit,
    bytes_per_region,
    region_block_bytes,
    row_bytes,
    token_bytes,
)
from tailrace.engine.model.shard import Shard
from tailrace.engine.model.sharding import check_tp, local_architecture
from tailrace.errors import ConfigError
from tailrace.models.architecture import Architecture
from tailrace.types import CacheForm


def longest_sequence(config: NativeEngineConfig, architecture: Architecture) -> int:
    """The most tokens of a sequence, prompt and response together."""
    return min(config.max_model_len or architecture.max_positions, architecture.max_positions)


def local_sizes(config: NativeEngineConfig, architecture: Architecture, tp: int) -> tuple[Architecture, int]:
    """The architecture of one of `tp` shards, and the blocks of its cache.

    Raises:
        ModelError: the model cannot be split into so many shards.
        ConfigError: the cache cannot hold a block.
    """
    check_tp(architecture, tp)
    local = local_architecture(architecture, tp)
    dtype = DTYPES[config.dtype]
    return local, blocks_that_fit(local, gib=config.kv_cache_gib, block_size=config.block_size, dtype=dtype)


def make_decoder(
    config: NativeEngineConfig,
    architecture: Architecture,
    shard: Shard,
    *,
    device: torch.device,
    collective: Collective,
) -> Decoder:
    """Make the decoder of the rank that holds `shard` of `architecture`.

    Raises:
        ModelError: the model cannot be split into so many shards.
        ConfigError: `kernels` is cpu, and the C++ kernels cannot compute this here.
        ConfigError: the cache cannot hold a block, or the device has no room for it.
    """
    local, _ = local_sizes(config, architecture, shard.degree)
    dtype, positions = DTYPES[config.dtype], longest_sequence(config, architecture)
    reason = why_torch(config, architecture, shard.degree, device=device)
    cache = KVCache.allocate(
        local,
        region_bytes=bytes_per_region(architecture, config.kv_cache_gib),
        block_size=config.block_size,
        dtype=dtype,
        device=device,
    )
    if reason is None:
        rope = cpu.rope_tables(architecture, positions)
        return CpuDecoder(local, cache=cache, rope=rope, collective=collective)
    rope = model.rope_tables(architecture, positions, dtype, device)
    return TorchDecoder(local, cache=cache, rope=rope, collective=collective, cuda_graphs=config.cuda_graphs)


def why_torch(
    config: NativeEngineConfig, architecture: Architecture, degree: int, *, device: torch.device
) -> str | None:
    """The reason why each of `degree` ranks computes with PyTorch, or None where it uses the C++ decoder.

    Raises:
        ConfigError: `kernels` is cpu, and the C++ kernels cannot compute this here.
    """
    if config.kernels == "torch":
        return "engine.kernels is torch"
    local = local_architecture(architecture, degree)
    reason = unsupported(local, block_size=config.block_size, dtype=DTYPES[config.dtype], device=device)
    if config.kernels == "cpu" and reason is not None:
        raise ConfigError(f"engine.kernels=cpu cannot be used: {reason}; set it to auto")
    return reason


def cache_form(config: NativeEngineConfig, architecture: Architecture, *, device: torch.device) -> CacheForm:
    """The form of the keys and values of an engine. Each kind of kernels has an order of its own in a block."""
    in_torch = why_torch(config, architecture, config.tp, device=device) is not None
    name = f"{architecture} {config.dtype} {'torch' if in_torch else 'cpu'} {config.block_size}"
    return CacheForm(name=name, token_bytes=token_bytes(architecture, DTYPES[config.dtype]))


def cache_shape(config: NativeEngineConfig, architecture: Architecture, tokens: int) -> tuple[int, ...]:
    """The shape of `SequenceCache.data` with so many tokens."""
    a, blocks = architecture, -(-tokens // config.block_size)
    return (a.layers, 2, blocks, a.kv_heads, row_bytes(a, config))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """The memory of one rank."""

    weights: int
    cache: int
    """The KV cache, as it was reserved."""
    block: int
    """One block of the cache, in all layers."""


def rank_bytes(config: NativeEngineConfig, architecture: Architecture, *, device: torch.device) -> RankBytes:
    """The bytes of each rank. `architecture` is that of the whole model, and such a rank can be made."""
    local, dtype = local_architecture(architecture, config.tp), DTYPES[config.dtype]
    in_torch = why_torch(config, architecture, config.tp, device=device) is not None
    packing = Packing(local, RowMajor(dtype, dtype) if in_torch else Packed(dtype))
    return RankBytes(
        weights=sum(map(packing.size, packing.groups)),
        cache=local.layers * bytes_per_region(architecture, config.kv_cache_gib),
        block=local.layers * region_block_bytes(local, config.block_size, dtype),
    )
