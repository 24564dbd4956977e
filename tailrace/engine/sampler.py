"""From logits to tokens, with the log-probability of each.

Temperature, top-k, top-p and min-p mean what they mean in transformers, in that order. A token is found by inverting
the cumulative distribution at one uniform number, which depends on the sample's seed and the token's position and on
nothing else, so a sample is the same whatever shares its batch. Without filters that is a few passes over the logits:
no sort, and no cumulative sum longer than a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from tailrace.config.engine import SamplingConfig
from tailrace.errors import EngineError

BLOCK = 256
"""Vocabulary entries that are summed before the first search."""
FIRST_CANDIDATES = 256
"""Most likely tokens looked at for top-p before more are."""

UInts = npt.NDArray[np.uint64]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """[N] numbers in [0, 1), one for each (seed, position): a counter-based generator.

    Two rounds of the SplitMix64 finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators"), the first over the seed, the second over the position added to its result.
    """
    keys = np.array([int(seed) % 2**64 for seed in seeds], np.uint64)
    mixed = _mix(_mix(keys) + np.array(positions, np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: UInts) -> UInts:
    x = x + np.uint64(0x9E37_79B9_7F4A_7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: UInts = x ^ (x >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of N rows, as columns."""

    temperature: torch.Tensor
    """[N] fp32"""
    top_k: torch.Tensor
    """[N] int64, 0 keeps all"""
    top_p: torch.Tensor
    """[N] fp32"""
    min_p: torch.Tensor
    """[N] fp32"""

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig], device: torch.device) -> Self:
        """The settings of a batch."""
        return cls(
            torch.tensor([config.temperature for config in configs], device=device),
            torch.tensor([config.top_k for config in configs], device=device),
            torch.tensor([config.top_p for config in configs], device=device),
            torch.tensor([config.min_p for config in configs], device=device),
        )

    @property
    def greedy(self) -> torch.Tensor:
        """[N] bool"""
        return self.temperature == 0

    @property
    def filtered(self) -> torch.Tensor:
        """[N] bool: some tokens may be cut off."""
        cut = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return cut & ~self.greedy

    def __getitem__(self, rows: torch.Tensor) -> "SamplingRows":
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def sample(
    logits_NV: torch.Tensor, rows: SamplingRows, uniforms_N: npt.NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """One token for each row and its log-probability under the distribution that it was drawn from.

    Greedy rows take the most likely token and report its log-probability at temperature 1.

    Raises:
        EngineError: a row has NaN or infinite logits.
    """
    vocabulary = logits_NV.shape[1]
    padded = logits_NV.new_empty(len(logits_NV), -(-vocabulary // BLOCK) * BLOCK, dtype=torch.float32)
    padded[:, vocabulary:] = 0
    weights = padded[:, :vocabulary].copy_(logits_NV)
    greedy = rows.greedy
    _scale_and_filter(weights, rows)
    likeliest, argmax = _likeliest(weights, greedy)
    weights.sub_(likeliest).exp_()
    sums = padded.view(len(padded), -1, BLOCK).sum(-1).double()
    total = sums.sum(-1)
    if not bool(total.isfinite().all()):
        raise EngineError("the logits are not finite; were the last weights?")
    drawn = _draw(padded, sums, torch.from_numpy(uniforms_N).to(padded.device))
    tokens = torch.where(greedy, argmax, drawn)
    log_probs = weights.gather(1, tokens[:, None])[:, 0].double().log() - total.log()
    return tokens.tolist(), log_probs.tolist()


def _likeliest(scores: torch.Tensor, greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest score [N, 1] and, for greedy rows, the first index that has it [N]."""
    argmax = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    if bool(greedy.any()):
        argmax[greedy] = scores[greedy].argmax(-1)
    return scores.amax(-1, keepdim=True), argmax


def _draw(padded: torch.Tensor, sums: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution at `uniforms_N`: the block first, the token inside it second."""
    cumulative = sums.cumsum(-1)
    target = uniforms_N * cumulative[:, -1]
    block = _first_above(cumulative, target)
    target = target - cumulative.gather(1, block[:, None])[:, 0] + sums.gather(1, block[:, None])[:, 0]
    inside = padded.view(len(padded), -1, BLOCK)[torch.arange(len(padded), device=padded.device), block].double()
    return block * BLOCK + _first_above(inside.cumsum(-1), target)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[N], the first index whose cumulative weight exceeds the target, so one of positive weight.

    Targets are kept just below the total, which rounding might let them reach.
    """
    total = cumulative[:, -1]
    below = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below.clamp_min(0)[:, None], right=True)[:, 0]


def _scale_and_filter(scores: torch.Tensor, rows: SamplingRows) -> None:
    """Turn logits into the scores of the distribution to sample from, in place. Greedy rows stay as they are."""
    temperature = torch.where(rows.greedy, 1.0, rows.temperature)
    if bool((temperature != 1).any()):
        scores.div_(temperature[:, None])
    cut = rows.filtered.nonzero()[:, 0]
    if len(cut):
        scores[cut] = _filter(scores[cut], rows[cut])


def _filter(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Scores with -inf for what top-k, then top-p, then min-p cut off; ties at the k-th place are kept."""
    if bool((rows.top_k > 0).any()):
        k = torch.where(rows.top_k > 0, rows.top_k, scores.shape[1]).clamp_max(scores.shape[1])
        some = (k < scores.shape[1]).nonzero()[:, 0]
        if len(some):
            ordered = scores[some].topk(int(k[some].max())).values
            threshold = ordered.gather(1, k[some, None] - 1)
            scores[some] = scores[some].masked_fill(scores[some] < threshold, -torch.inf)
    some = (rows.top_p < 1).nonzero()[:, 0]
    if len(some):
        scores[some] = _top_p(scores[some], rows.top_p[some])
    if bool((rows.min_p > 0).any()):
        ratio = (scores - scores.amax(-1, keepdim=True)).exp_()
        scores = scores.masked_fill(ratio < rows.min_p[:, None], -torch.inf)
    return scores


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each token whose more likely ones have less than `top_p` together.

    Looks at the most likely few tokens only, and at more where they do not reach `top_p`.
    """
    kept = torch.full_like(scores, -torch.inf)
    normalizer = scores.logsumexp(-1, keepdim=True)
    todo, width = torch.arange(len(scores), device=scores.device), FIRST_CANDIDATES
    while len(todo):
        width = min(width, scores.shape[1])
        values, indexes = scores[todo].topk(width)
        cumulative = (values - normalizer[todo]).exp().cumsum(-1)
        before = torch.cat((torch.zeros_like(cumulative[:, :1]), cumulative[:, :-1]), dim=-1)
        values = values.masked_fill(before >= top_p[todo, None], -torch.inf)
        kept[todo] = kept[todo].scatter(1, indexes, values)
        reached = (cumulative[:, -1] >= top_p[todo]) | (width == scores.shape[1])
        todo, width = todo[~reached], width * 8
    return kept
