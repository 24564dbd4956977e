"""Attention over blocks of the cache against plain attention over rows."""

import numpy as np
import pytest
import torch

from tailrace.engine.decoder.attention import StepAttention
from tailrace.engine.decoder.base import Batch
from tailrace.engine.kv_cache import KVCache
from tailrace.engine.scheduling.step import Chunk
from tests.engine.architectures import small_architecture
from tests.engine.caches import cache_of

BLOCKS, BLOCK_SIZE, HEAD_DIM, LAYER = 40, 4, 8, 1
CPU = torch.device("cpu")
Piece = tuple[int, int, list[int]]
"""The start, the number of tokens and the blocks of a chunk."""
STEPS: dict[str, list[Piece]] = {
    "decode": [(6, 1, [39, 0]), (0, 1, [3]), (11, 1, [20, 7, 12]), (3, 1, [9])],
    "a prompt": [(0, 7, [5, 1])],
    "the rest of a prompt": [(6, 5, [17, 3, 25])],
    "a mix": [(6, 1, [39, 0]), (4, 6, [8, 2, 30]), (11, 1, [20, 7, 12]), (0, 4, [31, 32])],
    "a shared prefix": [(5, 1, [10, 11]), (7, 1, [10, 12]), (4, 3, [10, 13])],
}


def make_cache(kv_heads: int) -> KVCache:
    architecture = small_architecture(kv_heads=kv_heads, head_dim=HEAD_DIM)
    cache = cache_of(architecture, blocks=BLOCKS, block_size=BLOCK_SIZE)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    return cache


def vectors(cache: KVCache, part: int, blocks: list[int], tokens: int) -> torch.Tensor:
    """The cached vectors of a sequence, [tokens, kv_heads, head_dim]; `part` 0 holds keys, 1 values."""
    pool = cache.data[LAYER, part].view(BLOCKS, -1, BLOCK_SIZE, HEAD_DIM)
    return torch.stack([pool[blocks[i // BLOCK_SIZE], :, i % BLOCK_SIZE] for i in range(tokens)])


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with one query, [query_heads, head_dim], to all of k and v, [L, kv_heads, head_dim]."""
    k, v = (x.repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("hd,lhd->hl", q, k) * HEAD_DIM**-0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


def batch_of(step: list[Piece]) -> Batch:
    return Batch.of([Chunk(start, [0] * tokens, blocks, None) for start, tokens, blocks in step], BLOCK_SIZE)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_each_token_sees_itself_and_all_before_in_its_sequence(step: list[Piece], heads: tuple[int, int]) -> None:
    query_heads, kv_heads = heads
    cache, batch = make_cache(kv_heads), batch_of(step)
    count, random = len(batch.tokens_T), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(count, n, HEAD_DIM, generator=random) for n in (query_heads, kv_heads, kv_heads))
    out = StepAttention.of_batch(cache, batch, CPU)(LAYER, q, k, v)
    assert out.shape == q.shape
    row = 0
    for start, tokens, blocks in step:
        for position in range(start, start + tokens):
            keys, values = (vectors(cache, part, blocks, position + 1) for part in (0, 1))
            torch.testing.assert_close(keys[-1], k[row])
            torch.testing.assert_close(values[-1], v[row])
            torch.testing.assert_close(out[row], plain_attention(q[row], keys, values))
            row += 1


def test_a_decoding_step_made_on_the_device_equals_one_made_from_its_batch() -> None:
    batch = batch_of(STEPS["decode"])
    count, random = len(batch.tokens_T), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(count, n, HEAD_DIM, generator=random) for n in (6, 2, 2))
    expected = make_cache(2)
    out = StepAttention.of_batch(expected, batch, CPU)(LAYER, q, k, v)
    cache = make_cache(2)
    wide = torch.from_numpy(np.pad(batch.tables_CN, ((0, 0), (0, 3))))
    attend = StepAttention.of_decode(cache, torch.from_numpy(batch.positions_T), wide)
    torch.testing.assert_close(attend(LAYER, q, k, v), out)
    assert torch.equal(cache.data, expected.data)


def test_nothing_but_the_new_vectors_is_written() -> None:
    cache, batch = make_cache(2), batch_of(STEPS["a mix"])
    before, count = cache.data.clone(), len(batch.tokens_T)
    new = torch.full((count, 2, HEAD_DIM), 7.0)
    StepAttention.of_batch(cache, batch, CPU)(LAYER, torch.zeros(count, 6, HEAD_DIM), new, new)
    changed = cache.data != before
    assert not changed[0].any()
    assert int(changed.sum()) == 2 * new.numel()
