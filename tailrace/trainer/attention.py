"""Causal attention over packed group parts whose responses share one copy of their prompt.

A response token sees its prompt and its own response up to itself. Each group part takes a few calls of
`scaled_dot_product_attention`. One is causal, over the prompt. The others are over responses of similar length side by
side, padded to the longest of them, each with the keys [prompt, own response]. So one long response among short ones
does not make all as long. Padding lies behind the real tokens, where a causal
mask hides it anyway. No tensor of size T × T is ever made.

The function plugs into the model code of transformers under the name `PROMPT_SHARED`. The layout is passed as the
keyword `layout` of the model's forward call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tailrace.trainer.packing import PartSpan
from tailrace.types import IntArray

PROMPT_SHARED = "tailrace_prompt_shared"


_SHORT = 32
"""Tokens of a response below which padding costs less than a further call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Responses that are padded to one width."""

    responses: int
    """G"""
    width: int
    mask: torch.Tensor
    """bool [width, prompt_tokens + width], true where a response token may attend."""

    @property
    def padded(self) -> int:
        """Their places: G * width."""
        return self.responses * self.width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartLayout:
    """A group part with A response tokens, which have P padded places in all of its rows."""

    start: int
    """Index of the prompt's first token in the packed row."""
    prompt_tokens: int
    response_tokens: int
    """A"""
    rows: tuple[Rows, ...]
    pad: torch.Tensor
    """[P] for each padded place, the index of its token among the A response tokens."""
    unpad: torch.Tensor
    """[A] for each response token, the index of its place among the P padded ones."""


Layout = tuple[PartLayout, ...]


def make_layout(spans: Sequence[PartSpan], device: torch.device) -> Layout:
    """Make the index and mask tensors of a micro-batch, once for all layers."""
    return tuple(_part_layout(span, device) for span in spans)


def _part_layout(span: PartSpan, device: torch.device) -> PartLayout:
    lengths = np.asarray(span.response_tokens)
    offsets = np.cumsum(lengths) - lengths
    rows: list[Rows] = []
    pads: list[IntArray] = []
    unpad = np.empty(int(lengths.sum()), np.int64)
    for alike in _alike(lengths):
        own = lengths[alike, None]
        width = int(own.max())
        column = np.arange(width)
        pad = (offsets[alike, None] + np.minimum(column, own - 1)).reshape(-1)
        real = np.flatnonzero(column < own)
        unpad[pad[real]] = sum(each.padded for each in rows) + real
        mask = torch.ones(width, span.prompt_tokens + width, dtype=torch.bool, device=device)
        rows.append(Rows(responses=len(alike), width=width, mask=mask.tril(span.prompt_tokens)))
        pads.append(pad)
    return PartLayout(
        start=span.start,
        prompt_tokens=span.prompt_tokens,
        response_tokens=len(unpad),
        rows=tuple(rows),
        pad=torch.from_numpy(np.concatenate(pads)).to(device),
        unpad=torch.from_numpy(unpad).to(device),
    )


def _alike(lengths: IntArray) -> list[IntArray]:
    """Places of responses whose lengths lie between the same two powers of two; short ones are all alike."""
    classes = np.ceil(np.log2(np.maximum(lengths, _SHORT))).astype(np.int64)
    return [np.flatnonzero(classes == each) for each in np.unique(classes)]


class _Pad(torch.autograd.Function):
    """Convert [A, …] to [P, …]. Padding repeats a row, and no gradient comes back through it."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, part: PartLayout) -> torch.Tensor:
        ctx.part = part
        return packed.index_select(0, part.pad)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].index_select(0, ctx.part.unpad), None


class _Unpad(torch.autograd.Function):
    """Convert [P, …] to [A, …]; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, part: PartLayout) -> torch.Tensor:
        ctx.part = part
        return padded.index_select(0, part.unpad)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        part: PartLayout = ctx.part
        padded = gradients[0].new_zeros(len(part.pad), *gradients[0].shape[1:])
        padded[part.unpad] = gradients[0]
        return padded, None


def prompt_shared_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer.

    Args:
        module: the attention module, unused.
        query: [1, heads, T, d]
        key: [1, key-value heads, T, d], like `value`.
        attention_mask: None; the layout replaces it.
        layout: the group parts of the packed row.
        scaling: factor on the scores.

    Returns:
        [1, T, heads, d] and no attention weights.
    """
    # On a CPU the bf16 kernel takes twice as long as the fp32 kernel on short responses, and no less on long ones.
    dtype = torch.float32 if query.device.type == "cpu" else value.dtype
    tokens = [tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value)]
    with torch.autocast(query.device.type, enabled=False):
        outputs = [out for part in layout for out in _attend_part(tokens, part, scaling)]
    return torch.cat(outputs)[None], None


def _attend_part(tokens: Sequence[torch.Tensor], part: PartLayout, scaling: float) -> list[torch.Tensor]:
    """The outputs of one group part: [prompt tokens, heads, d] and [A, heads, d]."""
    sizes = [part.prompt_tokens, part.response_tokens]
    query, key, value = (torch.split(t.narrow(0, part.start, sum(sizes)), sizes) for t in tokens)
    prompt = _sdpa(query[0][None], key[0][None], value[0][None], None, scaling)[0]
    padded = [_padded(packed, part) for packed in (query[1], key[1], value[1])]
    responses = [
        _sdpa(q, _with_prompt(key[0], k), _with_prompt(value[0], v), rows.mask, scaling).flatten(0, 1)
        for rows, q, k, v in zip(part.rows, *padded, strict=True)
    ]
    return [prompt, _Unpad.apply(torch.cat(responses), part)]  # type: ignore[no-untyped-call]


def _padded(packed: torch.Tensor, part: PartLayout) -> list[torch.Tensor]:
    """Pad [A, heads, d] to [G, width, heads, d] of each of the part's rows."""
    padded: torch.Tensor = _Pad.apply(packed, part)  # type: ignore[no-untyped-call]
    of_rows = torch.split(padded, [rows.padded for rows in part.rows])
    return [one.view(rows.responses, rows.width, *one.shape[1:]) for rows, one in zip(part.rows, of_rows, strict=True)]


def _with_prompt(prompt: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Put the prompt's tokens, [tokens, heads, d], in front of each response: [G, tokens + width, heads, d]."""
    return torch.cat([prompt.expand(len(responses), -1, -1, -1), responses], dim=1)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of [batch, tokens, heads, d], in and out; causal without a mask."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


# No mask function is registered under the name, so transformers builds no mask.
AttentionInterface.register(PROMPT_SHARED, prompt_shared_attention)
