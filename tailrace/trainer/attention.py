"""Causal attention over packed group parts whose responses share one copy of their prompt.

A response token sees its prompt and its own response up to itself. Sequences of similar length lie side by side, padded
to the longest of them, and take one call of `scaled_dot_product_attention`: prompts in a causal one, responses in one
with the keys [prompt, own response]. So one long response among short ones does not make all as long. Short sequences
of all group parts lie together, because a call costs more than they do; long ones lie with those of their own part.
Padding lies behind the real tokens, where a mask hides it. No tensor of size T × T is ever made.

The function plugs into the model code of transformers under the name `PROMPT_SHARED`. The layout is passed as the
keyword `layout` of the model's forward call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tailrace.trainer.packing import PartSpan
from tailrace.trainer.rows import take_rows
from tailrace.types import IntArray

PROMPT_SHARED = "tailrace_prompt_shared"


_SHORT = 32
"""Tokens of a sequence below which padding costs less than a further call."""

_TOGETHER = 256
"""Tokens of a prompt or response up to which it lies beside those of other group parts. So the masks of rows whose
prompts differ in length have at most 512 numbers for each place.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Responses of a block that are padded to one width."""

    prompt_R: torch.Tensor
    """The place of each response's prompt in the block."""
    prompt_tokens: int
    """P, of the longest of their prompts"""
    width: int
    """W"""
    mask: torch.Tensor
    """bool [R, 1, W, P + W], true where a response token may attend; [W, P + W] where all prompts are equally long."""

    @property
    def padded(self) -> int:
        """Their places: R * W."""
        return len(self.prompt_R) * self.width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Prompts that are padded to one width, and the responses to them."""

    prompts: int
    """B"""
    width: int
    rows: tuple[Rows, ...]

    @property
    def padded(self) -> list[int]:
        """The places of the prompts and of all rows."""
        return [self.prompts * self.width, *(rows.padded for rows in self.rows)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The blocks of a packed row of T tokens, with N padded places in all of them."""

    blocks: tuple[Block, ...]
    pad_N: torch.Tensor
    """For each place, the index of its token."""
    unpad_T: torch.Tensor
    """For each token, the index of its place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequences:
    """Responses, by the index of their first tokens and their numbers of tokens."""

    prompt: IntArray
    """The place of each one's prompt in the block."""
    start: IntArray
    tokens: IntArray

    def take(self, chosen: IntArray) -> "_Sequences":
        return _Sequences(prompt=self.prompt[chosen], start=self.start[chosen], tokens=self.tokens[chosen])


def make_layout(spans: Sequence[PartSpan], device: torch.device) -> Layout:
    """Make the index and mask tensors of a micro-batch, once for all layers."""
    blocks: list[Block] = []
    pads: list[IntArray] = []
    real: list[npt.NDArray[np.bool_]] = []
    for chosen in _alike(np.array([span.prompt_tokens for span in spans]), np.arange(len(spans))):
        parts = [spans[place] for place in chosen]
        prompts = np.array([part.prompt_tokens for part in parts])
        padded = [_pad(np.array([part.start for part in parts]), prompts)]
        rows: list[Rows] = []
        responses = _responses(parts)
        for own in map(responses.take, _alike(responses.tokens, responses.prompt)):
            padded.append(_pad(own.start, own.tokens))
            mask = _mask(prompts[own.prompt], int(own.tokens.max()), device)
            rows.append(
                Rows(
                    prompt_R=torch.from_numpy(own.prompt).to(device),
                    prompt_tokens=int(prompts[own.prompt].max()),
                    width=mask.shape[-2],
                    mask=mask,
                )
            )
        blocks.append(Block(prompts=len(parts), width=int(prompts.max()), rows=tuple(rows)))
        pads += [pad for pad, _ in padded]
        real += [is_real for _, is_real in padded]
    pad_N, real_N = np.concatenate(pads), np.flatnonzero(np.concatenate(real))
    unpad_T = np.empty(len(real_N), np.int64)
    unpad_T[pad_N[real_N]] = real_N
    return Layout(
        blocks=tuple(blocks), pad_N=torch.from_numpy(pad_N).to(device), unpad_T=torch.from_numpy(unpad_T).to(device)
    )


def _alike(tokens: IntArray, part: IntArray) -> Iterator[IntArray]:
    """The places of sequences of similar length: between the same two powers of two, and short ones are all alike.

    Those that are too long to lie beside sequences of other parts are apart from them.
    """
    classes = np.ceil(np.log2(np.maximum(tokens, _SHORT))).astype(np.int64)
    apart = np.where(tokens > _TOGETHER, part, -1)
    for kind in np.unique(np.stack([classes, apart]), axis=1).T:
        yield np.flatnonzero((classes == kind[0]) & (apart == kind[1]))


def _responses(parts: Sequence[PartSpan]) -> _Sequences:
    """The responses to the prompts of a block."""
    starts = [part.start + np.cumsum([part.prompt_tokens, *part.response_tokens])[:-1] for part in parts]
    return _Sequences(
        prompt=np.repeat(np.arange(len(parts)), [len(part.response_tokens) for part in parts]),
        start=np.concatenate(starts),
        tokens=np.concatenate([part.response_tokens for part in parts]),
    )


def _pad(start: IntArray, tokens: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """The index of each padded place's token, and whether the place is no padding. Padding repeats the last token."""
    column = np.arange(tokens.max())
    token = start[:, None] + np.minimum(column, tokens[:, None] - 1)
    return token.reshape(-1), (column < tokens[:, None]).reshape(-1)


def _mask(prompts: IntArray, width: int, device: torch.device) -> torch.Tensor:
    """See `Rows.mask`; `prompts` are the tokens of the prompt of each response."""
    longest = int(prompts.max())
    causal = torch.ones(width, longest + width, dtype=torch.bool, device=device).tril(longest)
    if (prompts == longest).all():
        return causal
    real = torch.arange(longest, device=device) < torch.from_numpy(prompts).to(device)[:, None]
    mask = causal.repeat(len(prompts), 1, 1, 1)
    mask[..., :longest] &= real[:, None, None]
    return mask


class _Pad(torch.autograd.Function):
    """Convert [T, …] to [N, …]. Padding repeats a row, and no gradient comes back through it."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        return packed.index_select(0, layout.pad_N)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].index_select(0, ctx.layout.unpad_T), None


class _Unpad(torch.autograd.Function):
    """Convert [N, …] to [T, …]; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        return padded.index_select(0, layout.unpad_T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout: Layout = ctx.layout
        padded = gradients[0].new_zeros(len(layout.pad_N), *gradients[0].shape[1:])
        padded[layout.unpad_T] = gradients[0]
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
        layout: of the packed row.
        scaling: factor on the scores.

    Returns:
        [1, T, heads, d] and no attention weights.
    """
    # On a CPU the bf16 kernel takes twice as long as the fp32 kernel on short responses, and no less on long ones.
    dtype = torch.float32 if query.device.type == "cpu" else value.dtype
    sizes = [size for block in layout.blocks for size in block.padded]
    with torch.autocast(query.device.type, enabled=False):
        packed = [tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value)]
        padded = [_Pad.apply(tensor, layout) for tensor in packed]  # type: ignore[no-untyped-call]
        pieces = zip(*(torch.split(tensor, sizes) for tensor in padded), strict=True)
        outputs = [out for block in layout.blocks for out in _attend(block, pieces, scaling)]
        return _Unpad.apply(torch.cat(outputs), layout)[None], None  # type: ignore[no-untyped-call]


def _attend(block: Block, pieces: Iterator[tuple[torch.Tensor, ...]], scaling: float) -> Iterator[torch.Tensor]:
    """The outputs of a block, [places, heads, d] of the prompts and of all rows; as many of `pieces` are its own."""
    query, *prompts = (_side_by_side(piece, block.width) for piece in next(pieces))
    yield _sdpa(query, prompts[0], prompts[1], None, scaling)
    for rows in block.rows:
        query, *own = (_side_by_side(piece, rows.width) for piece in next(pieces))
        key, value = (_behind(prompt, response, rows) for prompt, response in zip(prompts, own, strict=True))
        yield _sdpa(query, key, value, rows.mask, scaling)


def _side_by_side(places: torch.Tensor, width: int) -> torch.Tensor:
    """View [batch * width, heads, d] as [batch, width, heads, d]."""
    return places.view(-1, width, *places.shape[1:])


def _behind(prompts_BWhd: torch.Tensor, responses_RWhd: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Put its prompt's tokens in front of each response: [R, P + W, heads, d]."""
    prompts = prompts_BWhd[:, : rows.prompt_tokens]
    shared = len(prompts) == 1
    own = prompts.expand(len(rows.prompt_R), -1, -1, -1) if shared else take_rows(prompts, rows.prompt_R)
    return torch.cat([own, responses_RWhd], dim=1)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of [batch, tokens, heads, d]; causal without a mask. Returns [batch * tokens, heads, d]."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).flatten(0, 1)


# No mask function is registered under the name, so transformers builds no mask.
AttentionInterface.register(PROMPT_SHARED, prompt_shared_attention)
