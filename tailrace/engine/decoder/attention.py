"""Attention of one step over the block cache, on any device.

The rows that decode attend together, over block tables padded to the longest of them. Each longer chunk attends by
itself. When decoding, the query heads that share a KV head take the place of a sequence's queries, so no key or value
is repeated for them (Ainslie et al. 2023, GQA).

P below is the cache as vectors: one (block, KV head, offset) after the other.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F

from tailrace.engine.decoder.base import Batch
from tailrace.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """B rows, each the newest token of its sequence."""

    tables_BW: torch.Tensor
    mask_B11L: torch.Tensor
    """The positions that each row sees in its W blocks; L = W * block_size."""
    rows_B: torch.Tensor | None
    """The rows' places among the step's tokens; None where they are all of them."""

    @classmethod
    def of(
        cls, cache: KVCache, positions_B: torch.Tensor, tables_BW: torch.Tensor, rows_B: torch.Tensor | None
    ) -> Self:
        seen = torch.arange(tables_BW.shape[1] * cache.block_size, device=tables_BW.device)
        return cls(tables_BW, (seen <= positions_B[:, None])[:, None, None], rows_B)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q: [B, query_heads, D]; keys, values: one layer's, [blocks, kv_heads, block_size * D]; returns like q."""
        k, v = (_gather(pool, self.tables_BW, q.shape[2]) for pool in (keys, values))
        grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[2])
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=self.mask_B11L).reshape(q.shape)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive tokens of one sequence; their own keys are in the cache already."""

    rows: slice
    """The places of the tokens among the step's tokens."""
    end: int
    """The number of the sequence's tokens up to the chunk's last."""
    table_1W: torch.Tensor
    mask: torch.Tensor | None
    """[tokens, end]: what each token sees; None where the chunk begins the sequence, and is plainly causal."""

    @classmethod
    def of(cls, rows: slice, start: int, table_1W: torch.Tensor) -> Self:
        shape = (rows.stop - rows.start, start + rows.stop - rows.start)
        mask = torch.ones(shape, dtype=torch.bool, device=table_1W.device).tril(start) if start else None
        return cls(rows, shape[1], table_1W, mask)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `_DecodeRows.attend`; q: [tokens, query_heads, D]."""
        k, v = (_gather(pool, self.table_1W, q.shape[2])[:, :, : self.end] for pool in (keys, values))
        q, causal = q.transpose(0, 1)[None], self.mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=causal, enable_gqa=True)
        return out[0].transpose(0, 1)


def _gather(pool: torch.Tensor, tables_BW: torch.Tensor, size: int) -> torch.Tensor:
    """Gather the keys or values in these blocks: [B, kv_heads, W * block_size, D]."""
    heads = torch.arange(pool.shape[1], device=pool.device)[:, None]
    index_BKW = tables_BW[:, None] * len(heads) + heads
    return pool.flatten(0, 1).index_select(0, index_BKW.flatten()).view(len(tables_BW), len(heads), -1, size)


class StepAttention:
    """The keys and values that the tokens of one step attend to, prepared once for all layers."""

    def __init__(
        self, cache: KVCache, places_P: torch.Tensor, decode: _DecodeRows | None, chunks: list[_Chunk]
    ) -> None:
        self._cache = cache
        self._places_P = places_P
        self._decode = decode
        self._chunks = chunks

    @classmethod
    def of_batch(cls, cache: KVCache, batch: Batch, device: torch.device) -> Self:
        """Prepare a batch of any chunks."""
        tables_CN = torch.from_numpy(batch.tables_CN).to(device)
        positions_T = torch.from_numpy(batch.positions_T).to(device)
        chunk_T = torch.from_numpy(np.repeat(np.arange(len(tables_CN)), batch.lengths_C)).to(device)
        places_P = _places(cache, tables_CN[chunk_T, positions_T // cache.block_size], positions_T)
        ends_C = batch.lengths_C.cumsum()
        long, single = np.flatnonzero(batch.lengths_C > 1), np.flatnonzero(batch.lengths_C == 1)
        chunks = []
        for index in long.tolist():
            start, length, end = (int(column[index]) for column in (batch.starts_C, batch.lengths_C, ends_C))
            width = -(-(start + length) // cache.block_size)
            chunks.append(_Chunk.of(slice(end - length, end), start, tables_CN[index, None, :width]))
        if not len(single):
            return cls(cache, places_P, None, chunks)
        width = int(batch.starts_C[single].max()) // cache.block_size + 1
        tables_BW = tables_CN[torch.from_numpy(single).to(device), :width]
        rows_B = torch.from_numpy(ends_C[single] - 1).to(device)
        return cls(cache, places_P, _DecodeRows.of(cache, positions_T[rows_B], tables_BW, rows_B), chunks)

    @classmethod
    def of_decode(cls, cache: KVCache, positions_B: torch.Tensor, tables_BW: torch.Tensor) -> Self:
        """Prepare one token of each of B sequences. Computed on the device alone, so that a CUDA graph can hold it."""
        blocks_B = tables_BW.gather(1, positions_B[:, None] // cache.block_size)[:, 0]
        decode = _DecodeRows.of(cache, positions_B, tables_BW, None)
        return cls(cache, _places(cache, blocks_B, positions_B), decode, [])

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v of the step's tokens, [T, kv_heads, D], and attend with q, [T, query_heads, D].

        The result has the shape of q.
        """
        keys, values = self._cache.data[layer]
        for pool, new in ((keys, k), (values, v)):
            size = new.shape[-1]
            pool.view(-1, size).index_copy_(0, self._places_P, new.reshape(-1, size))
        if self._decode is not None and self._decode.rows_B is None:
            return self._decode.attend(q, keys, values)
        out = torch.empty_like(q)
        for chunk in self._chunks:
            out[chunk.rows] = chunk.attend(q[chunk.rows], keys, values)
        if self._decode is not None:
            out[self._decode.rows_B] = self._decode.attend(q[self._decode.rows_B], keys, values)
        return out


def _places(cache: KVCache, blocks_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """The places of these tokens' vectors among the P of the cache, [T * kv_heads]."""
    heads = torch.arange(cache.data.shape[3], device=blocks_T.device)
    block_heads = blocks_T[:, None] * len(heads) + heads
    return (block_heads * cache.block_size + (positions_T % cache.block_size)[:, None]).flatten()
