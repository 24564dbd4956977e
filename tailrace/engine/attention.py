"""Attention of one engine step over the block cache.

Decoding works on blocks, not on sequences: every (block, query) pair gives a partial softmax, and a sequence's pairs
are merged with weights from their log-sum-exps (Dao et al. 2022, FlashAttention, section 3.1). So keys and values are
read in place, without a gather into per-sequence rows, and a prompt block shared by a group is read once for the whole
group (Juravsky et al. 2024, Hydragen). Prefill attends one chunk at a time.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tailrace.engine.kv_cache import KVCache

Ints = npt.NDArray[np.int64]

SLICE_WASTE = 1.5
"""A slice of the pool is read in place while it is at most this many times larger than the live blocks in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Where one decoding sequence's cache lies."""

    prompt_blocks: Seq[int]
    """Full blocks of the prompt; rows with the same first one share them all."""
    blocks: Seq[int]
    """The sequence's own, at least one, the last of which holds the newest token."""
    last_block_tokens: int
    """Tokens in the last own block, the newest included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Consecutive tokens of one sequence whose keys and values are computed in this step."""

    start: int
    """Position of the first; everything before it is in the cache."""
    tokens: int
    blocks: Seq[int]
    """The blocks of positions 0 … start + tokens - 1 and maybe further ones."""


@dataclass(frozen=True, slots=True)
class BlockSet:
    """E blocks, each attended by G queries."""

    blocks: slice | torch.Tensor
    """A range of the pool, or indexes of it."""
    owners: torch.Tensor
    """[E * G] rows of the decode batch; what pads a block with fewer owners gives a result that nobody reads."""
    mask_E1K: torch.Tensor
    """0, or -inf on positions of the block that hold no token; K is the block size (or 1: all do)."""

    def select(self, pool: torch.Tensor) -> torch.Tensor:
        return pool[self.blocks] if isinstance(self.blocks, slice) else pool.index_select(0, self.blocks)


class DecodePlan:
    """The pairs of a decode batch, built once per step and used by every layer."""

    def __init__(self, rows: Seq[DecodeRow], block_size: int, device: torch.device) -> None:
        shared, shared_pairs = _shared_blocks(rows, device)
        own, own_pairs = _own_blocks(rows, block_size, device)
        self.sets = [blocks for blocks in (shared, own) if blocks is not None]
        offset = 0 if shared is None else len(shared.owners)
        pairs = [np.concatenate((s, o + offset)) for s, o in zip(shared_pairs, own_pairs, strict=True)]
        table = np.full((len(rows), max(map(len, pairs))), -1, np.int64)
        for row, row_pairs in zip(table, pairs, strict=True):
            row[: len(row_pairs)] = row_pairs
        self.table = torch.from_numpy(np.maximum(table, 0).ravel()).to(device)
        """[B * N], the pairs of each sequence, at most N and padded with pair 0."""
        self.padding_BN1 = torch.from_numpy(table < 0).to(device)[:, :, None]


def _shared_blocks(rows: Seq[DecodeRow], device: torch.device) -> tuple[BlockSet | None, list[Ints]]:
    """The prompt blocks, and the pairs of each row among theirs."""
    members: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.prompt_blocks:
            members.setdefault(row.prompt_blocks[0], []).append(index)
    groups = [(rows[indexes[0]].prompt_blocks, indexes) for indexes in members.values()]
    flat = np.fromiter(chain.from_iterable(blocks for blocks, _ in groups), np.int64)
    pairs: list[Ints] = [np.zeros(0, np.int64)] * len(rows)
    if not len(flat):
        return None, pairs
    selection, entries, count = _select(flat, device)
    width = max(len(indexes) for _, indexes in groups)
    owners = np.zeros((count, width), np.int64)
    start = 0
    for blocks, indexes in groups:
        mine = entries[start : start + len(blocks)]
        start += len(blocks)
        owners[mine, : len(indexes)] = indexes
        for place, index in enumerate(indexes):
            pairs[index] = mine * width + place
    return BlockSet(selection, torch.from_numpy(owners.ravel()).to(device), torch.zeros(1, 1, 1, device=device)), pairs


def _own_blocks(rows: Seq[DecodeRow], block_size: int, device: torch.device) -> tuple[BlockSet, list[Ints]]:
    """The blocks that belong to one row each, and the pairs of each row among theirs."""
    lengths = np.array([len(row.blocks) for row in rows])
    selection, entries, count = _select(np.fromiter(chain.from_iterable(r.blocks for r in rows), np.int64), device)
    owners = np.zeros(count, np.int64)
    owners[entries] = np.repeat(np.arange(len(rows)), lengths)
    filled = np.full((count, 1), block_size)
    filled[entries[lengths.cumsum() - 1], 0] = [row.last_block_tokens for row in rows]
    mask = np.where(np.arange(block_size) < filled, 0.0, -np.inf).astype(np.float32)[:, None]
    blocks = BlockSet(selection, torch.from_numpy(owners).to(device), torch.from_numpy(mask).to(device))
    return blocks, np.split(entries, lengths.cumsum()[:-1])


def _select(blocks: Ints, device: torch.device) -> tuple[slice | torch.Tensor, Ints, int]:
    """How to read `blocks` from the pool, the place of each in what is read, and how many blocks that is."""
    low, high = int(blocks.min()), int(blocks.max()) + 1
    if high - low <= SLICE_WASTE * len(blocks):
        return slice(low, high), blocks - low, high - low
    return torch.from_numpy(blocks).to(device), np.arange(len(blocks)), len(blocks)


def decode_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    """One query a sequence against its blocks.

    q: [B, query_heads, head_dim]; keys, values: one layer's pool; returns [B, query_heads, head_dim].
    """
    parts = [_attend_blocks(q, blocks.select(keys), blocks.select(values), blocks) for blocks in plan.sets]
    outputs = torch.cat([output for output, _ in parts])
    lse = torch.cat([lse for _, lse in parts])
    shape = (*plan.padding_BN1.shape[:2], q.shape[1], -1)
    lse_BNQ1 = lse.index_select(0, plan.table).view(shape).masked_fill_(plan.padding_BN1[..., None], -torch.inf)
    return (outputs.index_select(0, plan.table).view(shape) * lse_BNQ1.softmax(dim=1)).sum(dim=1).to(q.dtype)


def _attend_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: BlockSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial attention of every pair: [E * G, query_heads, head_dim], and its log-sum-exps [E * G, query_heads]."""
    count, kv_heads, block_size, head_dim = k.shape
    group = len(blocks.owners) // count
    per_kv = q.shape[1] // kv_heads
    q = q.index_select(0, blocks.owners).view(count, group, kv_heads, per_kv, head_dim).transpose(1, 2)
    q = q.reshape(count * kv_heads, group * per_kv, head_dim)
    k, v = k.reshape(-1, block_size, head_dim), v.reshape(-1, block_size, head_dim)
    scores = torch.bmm(q, k.mT).view(count, -1, block_size)
    scores = torch.add(blocks.mask_E1K, scores, alpha=head_dim**-0.5)  # the mask's fp32 wins
    weights = scores.softmax(-1)
    lse = scores.amax(-1) - weights.amax(-1).log()  # the largest weight is exp(largest score - lse)
    outputs = torch.bmm(weights.to(v.dtype).view(-1, group * per_kv, block_size), v)
    return (
        outputs.view(count, kv_heads, group, per_kv, head_dim).transpose(1, 2).reshape(-1, kv_heads * per_kv, head_dim),
        lse.view(count, kv_heads, group, per_kv).transpose(1, 2).reshape(-1, kv_heads * per_kv),
    )


class PrefillPlan:
    """What a chunk attends to, built once per step and used by every layer."""

    def __init__(self, chunk: PrefillChunk, block_size: int, device: torch.device) -> None:
        self.tokens = chunk.tokens
        self.end = chunk.start + chunk.tokens
        """Tokens of the sequence up to the chunk's last."""
        self.blocks = torch.tensor(chunk.blocks[: -(-self.end // block_size)], device=device)
        self.mask: torch.Tensor | None = None
        """[tokens, end], what each token sees; None where the chunk is all there is, and plainly causal."""
        if chunk.start:
            self.mask = torch.ones(self.tokens, self.end, dtype=torch.bool, device=device).tril(chunk.start)


def prefill_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
    """A chunk's queries against everything up to themselves; their own keys are in the cache already.

    q: [plan.tokens, query_heads, head_dim]; returns the same.
    """
    k, v = (pool[plan.blocks].transpose(0, 1).flatten(1, 2)[None, :, : plan.end] for pool in (keys, values))
    q = q.transpose(0, 1)[None]
    causal = plan.mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, is_causal=causal, enable_gqa=True)
    return out[0].transpose(0, 1)


class StepAttention:
    """The attention of one packed step: prefill chunks first, then one token of every decoding sequence."""

    def __init__(
        self, cache: KVCache, prefills: Seq[PrefillPlan], decode: DecodePlan | None, slots_T: torch.Tensor
    ) -> None:
        self._cache = cache
        self._prefills = prefills
        self._decode = decode
        self._rows = cache.rows(slots_T)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `model.Attention`."""
        self._cache.write(layer, self._rows, k, v)
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        parts, start = [], 0
        for plan in self._prefills:
            parts.append(prefill_attention(q[start : start + plan.tokens], keys, values, plan))
            start += plan.tokens
        if self._decode is not None:
            parts.append(decode_attention(q[start:], keys, values, self._decode))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
