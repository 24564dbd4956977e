"""The memory of the KV cache."""

import re

import pytest
import torch

from tailrace.engine.kv_cache import KVCache, blocks_that_fit, bytes_per_region
from tailrace.errors import ConfigError
from tests.engine.architectures import small_architecture
from tests.engine.caches import cache_of

CPU = torch.device("cpu")


def test_copies_happen_as_if_at_the_same_moment_and_touch_no_other_block() -> None:
    cache = cache_of(small_architecture(), blocks=5, block_size=4)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.data.clone()
    cache.copy([(2, 0), (4, 3)])
    assert torch.equal(cache.data, before[:, :, [2, 1, 2, 4, 4]])
    cache.copy([])
    assert torch.equal(cache.data, before[:, :, [2, 1, 2, 4, 4]])


def test_a_layers_cache_is_contiguous_and_begins_with_zeros() -> None:
    cache = cache_of(small_architecture(kv_heads=3), blocks=5, block_size=4, dtype=torch.bfloat16)
    assert cache.data.shape == (2, 2, 5, 3, 4 * 4)
    assert all(layer.is_contiguous() for layer in cache.data)
    assert not cache.data.any()
    assert cache.blocks == 5


def test_the_cache_takes_no_more_memory_than_it_was_given() -> None:
    block_bytes = 2 * 2 * 2 * 4 * 4 * 2
    gib = 10.5 * block_bytes / 2**30
    assert blocks_that_fit(small_architecture(), gib=gib, block_size=4, dtype=torch.bfloat16) == 10


@pytest.mark.parametrize("gib", [2e-6, 3e-6, 1e-5, 0.001])
def test_a_cache_of_another_shape_has_the_blocks_that_fit_and_lies_in_the_same_regions(gib: float) -> None:
    whole, shard = small_architecture(layers=3, kv_heads=3), small_architecture(layers=3, kv_heads=2)
    region_bytes = bytes_per_region(whole, gib)
    cache = KVCache.allocate(whole, region_bytes=region_bytes, block_size=4, dtype=torch.float32, device=CPU)
    first, other = cache, cache.reshaped(shard)
    for made, architecture in ((first, whole), (other, shard), (other.reshaped(whole), whole)):
        assert made.blocks == blocks_that_fit(architecture, gib=gib, block_size=4, dtype=torch.float32)
        assert [layer.data_ptr() for layer in made.data] == [layer.data_ptr() for layer in first.data]
    other.data[1] = 7
    assert (first.data[1].flatten()[: other.data[1].numel()] == 7).all()
    assert not first.data[0].any()
    assert not first.data[2].any()


def test_a_shape_of_which_no_block_fits_is_refused() -> None:
    cache = cache_of(small_architecture(kv_heads=1), blocks=1, block_size=4)
    with pytest.raises(ConfigError, match=r"no room for a block of 4 tokens with 2 KV heads; raise engine"):
        cache.reshaped(small_architecture(kv_heads=2))


@pytest.mark.parametrize("block_size", [4, 16, 64, 1000])
def test_memory_for_less_than_a_block_is_refused_and_what_is_told_instead_is_enough(block_size: int) -> None:
    few = r"engine\.kv_cache_gib 1e-07 holds no block of \d+ tokens; raise it to (0\.0\d+) or more"
    with pytest.raises(ConfigError, match=few) as caught:
        blocks_that_fit(small_architecture(), gib=1e-7, block_size=block_size, dtype=torch.bfloat16)
    told = re.search(few, str(caught.value))
    assert told is not None
    assert blocks_that_fit(small_architecture(), gib=float(told[1]), block_size=block_size, dtype=torch.bfloat16) >= 1
