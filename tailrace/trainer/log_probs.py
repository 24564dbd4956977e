"""Log-probabilities of tokens from hidden states, a block of the vocabulary at a time.

The N × V logits never exist at once. The forward pass keeps a running log-sum-exp over blocks of the vocabulary; the
backward pass computes each block again. Blocks lie along the vocabulary, not along the tokens, so every row of the
head's gradient is made by one matrix product and written once.
"""

from collections.abc import Iterator
from typing import Any

import torch

MAX_BLOCK_ELEMENTS = 2**21
"""Logits held at once on a CPU: 8 MiB of fp32, which stay in its cache between the passes over them."""
MAX_BLOCK_ELEMENTS_ELSEWHERE = 2**26
"""The same on a GPU: 256 MiB of fp32. Small blocks take longer to launch than to compute there."""


def token_log_probs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, target_N: torch.Tensor, *, temperature: float, dtype: torch.dtype
) -> torch.Tensor:
    """Compute log softmax(hidden @ weight.T / temperature) at the targets.

    Args:
        hidden_NH: the hidden state that predicts each target.
        weight_VH: the language-model head, which has no bias.
        target_N: int64.
        temperature: of the softmax; sampling's, so that the result matches the rollout's log-probabilities.
        dtype: of the operands of matrix products. The softmax and all sums over blocks are fp32.

    Returns:
        [N] fp32, differentiable in `hidden_NH` and `weight_VH`.
    """
    result: torch.Tensor = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, target_N, temperature, dtype
    )
    return result


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_N: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        hidden = hidden_NH.to(dtype)
        largest = torch.full((len(hidden), 1), -torch.inf, device=hidden.device)
        total, chosen = torch.zeros_like(largest), torch.zeros_like(largest)
        for block in _blocks(len(hidden), weight_VH):
            logits = _logits(hidden, weight_VH[block].to(dtype), temperature)
            place, inside = _locate(target_N, block)
            chosen += logits.gather(1, place) * inside
            previous, largest = largest, torch.maximum(largest, logits.amax(1, keepdim=True))
            total = total * (previous - largest).exp() + logits.sub_(largest).exp_().sum(1, keepdim=True)
        log_sum = largest + total.log()
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, log_sum)
        ctx.temperature, ctx.dtype = temperature, dtype
        return (chosen - log_sum).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """Compute d log p(target) / d logits = (one-hot(target) - softmax(logits)) / temperature."""
        hidden_NH, weight_VH, target_N, log_sum = ctx.saved_tensors
        gradient = gradients[0][:, None] / ctx.temperature
        hidden = hidden_NH.to(ctx.dtype)
        d_hidden = torch.zeros_like(hidden_NH, dtype=torch.float32)
        d_weight = torch.empty_like(weight_VH)
        for block in _blocks(len(hidden), weight_VH):
            weight = weight_VH[block].to(ctx.dtype)
            d_logits = _logits(hidden, weight, ctx.temperature).sub_(log_sum).exp_().mul_(-gradient)
            place, inside = _locate(target_N, block)
            d_logits.scatter_add_(1, place, gradient * inside)
            rounded = d_logits.to(ctx.dtype)
            d_hidden += rounded @ weight
            d_weight[block] = rounded.T @ hidden
        return d_hidden.to(hidden_NH.dtype), d_weight, None, None, None


def _blocks(tokens: int, weight_VH: torch.Tensor) -> Iterator[slice]:
    vocabulary, elements = len(weight_VH), MAX_BLOCK_ELEMENTS if weight_VH.is_cpu else MAX_BLOCK_ELEMENTS_ELSEWHERE
    width = max(1, elements // max(1, tokens))
    return (slice(low, min(low + width, vocabulary)) for low in range(0, vocabulary, width))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logits of a block, [N, block] fp32."""
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _locate(target_N: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 1] each: the column of every target in the block (any column if it is elsewhere), and whether it is there."""
    width = block.stop - block.start
    place = (target_N - block.start)[:, None]
    return place.clamp(0, width - 1), (place >= 0) & (place < width)
