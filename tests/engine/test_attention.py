"""Attention over blocks against plain attention over rows."""

import pytest
import torch

from tailrace.engine.attention import (
    DecodePlan,
    DecodeRow,
    PrefillChunk,
    PrefillPlan,
    decode_attention,
    prefill_attention,
)

BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, QUERY_HEADS = 40, 2, 4, 8, 6
CPU = torch.device("cpu")


def make_pools() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def gather(pool: torch.Tensor, blocks: list[int], tokens: int) -> torch.Tensor:
    """[query_heads, tokens, head_dim], each KV head repeated for its query heads."""
    rows = pool[blocks].transpose(0, 1).flatten(1, 2)[:, :tokens]
    return rows.repeat_interleave(QUERY_HEADS // KV_HEADS, dim=0)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q: [query_heads, head_dim]"""
    scores = (k @ q[..., None])[..., 0] * HEAD_DIM**-0.5
    return torch.einsum("hl,hld->hd", scores.softmax(-1), v)


DENSE = [
    ([39, 38], [0, 1], 3),
    ([39, 38], [2], 4),
    ([], [3], 1),
    ([37], [4, 5, 6], 2),
    ([39, 38], [7], 1),
]
SCATTERED = [
    ([39, 20], [0, 18], 3),
    ([39, 20], [9], 4),
    ([], [3], 1),
    ([5], [11, 30, 14], 2),
]


@pytest.mark.parametrize("layout", [DENSE, SCATTERED, DENSE[2:3], SCATTERED[:1]])
def test_block_attention_equals_attention_over_each_sequence(layout: list[tuple[list[int], list[int], int]]) -> None:
    keys, values = make_pools()
    q = torch.randn(len(layout), QUERY_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    rows = [DecodeRow(prompt_blocks=p, blocks=b, last_block_tokens=last) for p, b, last in layout]
    out = decode_attention(q, keys, values, DecodePlan(rows, BLOCK_SIZE, CPU))
    for index, (prompt, blocks, last) in enumerate(layout):
        tokens = (len(prompt) + len(blocks) - 1) * BLOCK_SIZE + last
        k, v = (gather(pool, prompt + blocks, tokens) for pool in (keys, values))
        torch.testing.assert_close(out[index], plain_attention(q[index], k, v))


def test_dense_blocks_are_read_in_place_and_scattered_ones_are_gathered() -> None:
    for layout, expected in ((DENSE, slice), (SCATTERED, torch.Tensor)):
        rows = [DecodeRow(prompt_blocks=p, blocks=b, last_block_tokens=last) for p, b, last in layout]
        assert all(isinstance(s.blocks, expected) for s in DecodePlan(rows, BLOCK_SIZE, CPU).sets)


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 7), (4, 5), (6, 1)])
def test_each_token_of_a_chunk_sees_itself_and_all_before(start: int, tokens: int) -> None:
    keys, values = make_pools()
    blocks = [17, 3, 25, 8]
    q = torch.randn(tokens, QUERY_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    plan = PrefillPlan(PrefillChunk(start=start, tokens=tokens, blocks=blocks), BLOCK_SIZE, CPU)
    out = prefill_attention(q, keys, values, plan)
    for index in range(tokens):
        k, v = (gather(pool, blocks, start + index + 1) for pool in (keys, values))
        torch.testing.assert_close(out[index], plain_attention(q[index], k, v))
