"""Drawing tokens from logits that are spread over ranks, the same tokens whatever the number of ranks.

Each rank sums the weights of its share of the vocabulary in blocks. All ranks gather the same sums, choose the same
block, and learn the token from the block's owner. Blocks begin at the same tokens whatever the number of ranks, so the
number of ranks changes no bit of the result.

    maxima ─▶ all_gather ─▶ block sums ─▶ all_gather ─▶ choose a block ─▶ its owner finds the token ─▶ all_gather

On CUDA the host waits once, at the end.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tailrace.engine.collectives.base import Collective
from tailrace.engine.model.sharding import VOCAB_MULTIPLE

BLOCK = VOCAB_MULTIPLE
"""Vocabulary entries of a block, which are summed before the first search."""
CPU_ENTRIES = 2**16
"""Logits whose exponentials a CPU holds at a time, so that they stay in its cache."""


class DrawInputs(NamedTuple):
    """The inputs for drawing N tokens."""

    logits_NV: torch.Tensor
    """This rank's, [N, V_local] fp32, V_local a multiple of BLOCK. `draw` sets those beyond the vocabulary to -inf."""
    greedy_N: torch.Tensor
    """[N] bool: whether the row takes the likeliest token."""
    scale_N: torch.Tensor
    """[N] fp32: 1 / temperature."""
    uniforms_N: npt.NDArray[np.float64]
    """One number in [0, 1) for each row."""
    vocab_size: int
    """Tokens of all ranks together."""


class Drawn(NamedTuple):
    """N tokens, the same on every rank."""

    tokens_N: npt.NDArray[np.int64]
    weights_N: npt.NDArray[np.float64]
    """exp((logit - largest logit) * scale), in fp32, of each token."""
    totals_N: npt.NDArray[np.float64]
    """The sum of the weights of the whole row; not finite where a logit is NaN or infinite."""


class Drawing(Protocol):
    """One rank's part in the drawing."""

    def draw(self, inputs: DrawInputs) -> Drawn:
        """Invert each row's cumulative weights at its number; greedy rows take the first of the likeliest tokens.

        Raises:
            EngineError: a rank did not take part.
        """


def own_tokens(rank: int, width: int, vocab_size: int) -> int:
    """The number of a rank's `width` logits that belong to tokens; the others are padding."""
    return min(max(vocab_size - rank * width, 0), width)


def whole_rows(collective: Collective, part: torch.Tensor, columns: int) -> torch.Tensor:
    """Gather [N, X_local] to [N, columns]; columns beyond are padding."""
    if collective.size == 1:
        return part[:, :columns]
    gathered = collective.all_gather(part.contiguous())
    return gathered.transpose(0, 1).flatten(1)[:, :columns]


@dataclass(frozen=True, slots=True)
class TorchDrawing:
    """Draws on any device, with any collective."""

    collective: Collective

    def draw(self, inputs: DrawInputs) -> Drawn:
        """See `Drawing`."""
        logits_NV, greedy_N, scale_N, uniforms_N, vocab_size = inputs
        logits_NV[:, own_tokens(self.collective.rank, logits_NV.shape[1], vocab_size) :] = -torch.inf
        maxima_N, likeliest_N = self._likeliest(logits_NV)
        blocks = -(-vocab_size // BLOCK)
        sums_NK = whole_rows(self.collective, _block_sums(logits_NV, maxima_N, scale_N), blocks)
        cumulative_NK = sums_NK.cumsum(-1)
        total_N = cumulative_NK[:, -1]
        target_N = torch.from_numpy(uniforms_N).to(logits_NV.device) * total_N
        block_N = _first_above(cumulative_NK, target_N)
        inside_N = target_N - (cumulative_NK - sums_NK).gather(1, block_N[:, None])[:, 0]
        token_N, weight_N = self._resolve(logits_NV, block_N, inside_N, maxima_N, scale_N)
        token_N, weight_N = torch.where(greedy_N, likeliest_N, token_N), torch.where(greedy_N, 1.0, weight_N)
        tokens, weights, totals = torch.stack((token_N, weight_N, total_N)).cpu().numpy()
        return Drawn(tokens.astype(np.int64), weights, totals)

    def _likeliest(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the largest logit [N] fp32 and the first token that has it [N] fp64, over all ranks."""
        # Block by block, because torch vectorizes a maximum but not one with its index.
        largest_N, block_N = logits_NV.view(len(logits_NV), -1, BLOCK).amax(-1).max(-1)
        token_N = block_N * BLOCK + _block(logits_NV, block_N).argmax(-1) + self.collective.rank * logits_NV.shape[1]
        found_R2N = self.collective.all_gather(torch.stack((largest_N.double(), token_N.double())))
        maxima_N, rank_N = found_R2N[:, 0].max(0)
        return maxima_N.float(), found_R2N[:, 1].gather(0, rank_N[None])[0]

    def _resolve(
        self,
        logits_NV: torch.Tensor,
        block_N: torch.Tensor,
        inside_N: torch.Tensor,
        maxima_N: torch.Tensor,
        scale_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the token at `inside_N` of the block's weights, and its weight, [N] fp64 each. The owner does so."""
        blocks, rank = logits_NV.shape[1] // BLOCK, self.collective.rank
        own_N = (block_N - rank * blocks).clamp(0, blocks - 1)
        weights_NB = (_block(logits_NV, own_N) - maxima_N[:, None]).mul_(scale_N[:, None]).exp_().double()
        index_N = _first_above(weights_NB.cumsum(-1), inside_N)
        token_N, weight_N = block_N * BLOCK + index_N, weights_NB.gather(1, index_N[:, None])[:, 0]
        found_R2N = self.collective.all_gather(torch.stack((token_N.double(), weight_N)))
        owner_N = torch.div(block_N, blocks, rounding_mode="floor")
        token_N, weight_N = found_R2N.gather(0, owner_N.expand(1, 2, -1))[0]
        return token_N, weight_N


def _block_sums(logits_NV: torch.Tensor, maxima_N: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    """Sum the weights of each block, [N, V_local / BLOCK] fp64. A sum depends on the logits of its block alone."""
    count, width = logits_NV.shape
    step = max(1, CPU_ENTRIES // width) if logits_NV.device.type == "cpu" else max(1, count)
    sums = logits_NV.new_empty(count, width // BLOCK)
    for first in range(0, count, step):
        rows = slice(first, first + step)
        weights = (logits_NV[rows] - maxima_N[rows, None]).mul_(scale_N[rows, None]).exp_()
        torch.sum(weights.view(len(weights), -1, BLOCK), -1, out=sums[rows])
    return sums.double()


def _block(logits_NV: torch.Tensor, blocks_N: torch.Tensor) -> torch.Tensor:
    """Take one block of each row, [N, BLOCK]."""
    rows = torch.arange(len(logits_NV), device=logits_NV.device)
    return logits_NV.view(len(logits_NV), -1, BLOCK)[rows, blocks_N]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Find the first index whose cumulative weight exceeds the target, [N]. Its own weight is positive.

    Targets are kept just below the total, which rounding might let them reach. The index is arbitrary for NaN weights.
    """
    total = cumulative[:, -1]
    below = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total))).clamp_min(0)
    return torch.searchsorted(cumulative, below[:, None], right=True)[:, 0].clamp_max(cumulative.shape[1] - 1)
