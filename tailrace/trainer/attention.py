"""Causal attention over packed group parts whose responses share one copy of their prompt.

A response token sees its prompt and its own response up to itself. Each group part takes two calls of
`scaled_dot_product_attention`. One is causal, over the prompt. The other is over the part's responses side by side,
padded to the longest, each with the keys [prompt, own response]. Padding lies behind the real tokens, where a causal
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

PROMPT_SHARED = "tailrace_prompt_shared"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartLayout:
    """A group part of G responses, the longest of `width` tokens, with A response tokens together."""

    start: int
    """Index of the prompt's first token in the packed row."""
    prompt_tokens: int
    response_tokens: int
    """A"""
    responses: int
    """G"""
    pad: torch.Tensor
    """[G * width] for each padded place, the index of its token among the A response tokens."""
    unpad: torch.Tensor
    """[A] for each response token, the index of its place among the G * width padded ones."""
    mask: torch.Tensor
    """bool [width, prompt_tokens + width], true where a response token may attend."""


Layout = tuple[PartLayout, ...]


def make_layout(spans: Sequence[PartSpan], device: torch.device) -> Layout:
    """Make the index and mask tensors of a micro-batch, once for all layers."""
    return tuple(_part_layout(span, device) for span in spans)


def _part_layout(span: PartSpan, device: torch.device) -> PartLayout:
    lengths = np.asarray(span.response_tokens)
    width = int(lengths.max())
    offsets = np.cumsum(lengths) - lengths
    column = np.arange(width)
    pad = offsets[:, None] + np.minimum(column, lengths[:, None] - 1)
    unpad = np.flatnonzero(column < lengths[:, None])
    mask = torch.ones(width, span.prompt_tokens + width, dtype=torch.bool, device=device)
    return PartLayout(
        start=span.start,
        prompt_tokens=span.prompt_tokens,
        response_tokens=int(lengths.sum()),
        responses=len(lengths),
        pad=torch.from_numpy(pad.reshape(-1)).to(device),
        unpad=torch.from_numpy(unpad).to(device),
        mask=mask.tril(span.prompt_tokens),
    )


class _Pad(torch.autograd.Function):
    """Convert [A, …] to [G * width, …]. Padding repeats a row, and no gradient comes back through it."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, part: PartLayout) -> torch.Tensor:
        ctx.part = part
        return packed.index_select(0, part.pad)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].index_select(0, ctx.part.unpad), None


class _Unpad(torch.autograd.Function):
    """Convert [G * width, …] to [A, …]; the gradient of padding is zero."""

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
    responses = _sdpa(
        _rows(query[1], part), _with_prompt(key, part), _with_prompt(value, part), part.mask, scaling
    ).flatten(0, 1)
    return [prompt, _Unpad.apply(responses, part)]  # type: ignore[no-untyped-call]


def _rows(packed: torch.Tensor, part: PartLayout) -> torch.Tensor:
    """Pad [A, heads, d] to [G, width, heads, d]."""
    padded: torch.Tensor = _Pad.apply(packed, part)  # type: ignore[no-untyped-call]
    return padded.view(part.responses, -1, *packed.shape[1:])


def _with_prompt(tensors: Sequence[torch.Tensor], part: PartLayout) -> torch.Tensor:
    """Put the prompt's [P, heads, d] in front of each response: [G, P + width, heads, d]."""
    prompt, responses = tensors
    return torch.cat([prompt.expand(part.responses, -1, -1, -1), _rows(responses, part)], dim=1)


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
