"""The sampler: from logits to tokens and their log-probabilities, whatever the number of ranks with the vocabulary.

Temperature, top-k, top-p and min-p mean what they mean in transformers, and apply in that order. A token is found by
inverting the cumulative distribution at one uniform number. The number depends on the sample's seed and the token's
position, and on nothing else, so a sample is the same whatever shares its batch.

The vocabulary may be spread over ranks (`drawing.py`). Only rows with a filter are gathered whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from tailrace.engine.collectives.base import Collective
from tailrace.engine.sampling.drawing import Drawing, DrawInputs, own_tokens, whole_rows
from tailrace.errors import EngineError

FIRST_CANDIDATES = 256
"""The number of most likely tokens that top-p looks at first."""

UInts = npt.NDArray[np.uint64]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Make [N] numbers in [0, 1), one for each (seed, position), with a counter-based generator.

    It takes two rounds of the SplitMix64 finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
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


class Settings(Protocol):
    """The settings by which one token is drawn: a `Draw` or a `SamplingConfig`."""

    @property
    def temperature(self) -> float:
        """The divisor of the logits; 0 is greedy."""

    @property
    def top_k(self) -> int:
        """The number of likeliest tokens that are drawn from; 0 for all."""

    @property
    def top_p(self) -> float:
        """The likeliest tokens that together have this probability are drawn from; 1 for all."""

    @property
    def min_p(self) -> float:
        """The least probability of a token that is drawn from, as a part of the likeliest one's; 0 for all."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of N rows, as columns."""

    greedy_N: torch.Tensor
    """bool"""
    scale_N: torch.Tensor
    """fp32, 1 / temperature; 1 for greedy rows"""
    filters: "_Filters | None"
    """The filters of the rows that have one; None if there are none."""

    @classmethod
    def of(cls, rows: Sequence[Settings], device: torch.device) -> Self:
        """Collect the settings of a batch."""
        greedy = torch.tensor([row.temperature == 0 for row in rows], device=device)
        scale = [1 / row.temperature if row.temperature else 1.0 for row in rows]
        return cls(greedy, torch.tensor(scale, device=device), _Filters.of(rows, device))


@dataclass(frozen=True, slots=True)
class _Filters:
    """The filters that cut tokens off, for n rows."""

    rows_n: torch.Tensor
    """int64, the numbers of these rows"""
    top_k_n: torch.Tensor
    """int64, 0 keeps all"""
    top_p_n: torch.Tensor
    """fp32"""
    min_p_n: torch.Tensor
    """fp32"""

    @classmethod
    def of(cls, rows: Sequence[Settings], device: torch.device) -> Self | None:
        filtered = [i for i, row in enumerate(rows) if row.temperature and (row.top_k or row.top_p < 1 or row.min_p)]
        if not filtered:
            return None
        return cls(
            torch.tensor(filtered, device=device),
            torch.tensor([rows[i].top_k for i in filtered], device=device),
            torch.tensor([rows[i].top_p for i in filtered], device=device),
            torch.tensor([rows[i].min_p for i in filtered], device=device),
        )


class Sampler:
    """Samples on one rank. Every rank calls `sample` with the same rows and gets the same result."""

    def __init__(self, vocab_size: int, collective: Collective, drawing: Drawing) -> None:
        """`vocab_size` counts the real tokens, of all ranks together."""
        self._vocab_size = vocab_size
        self._collective = collective
        self._drawing = drawing

    def sample(
        self, logits_NV: torch.Tensor, rows: SamplingRows, uniforms_N: npt.NDArray[np.float64]
    ) -> tuple[list[int], list[float]]:
        """Draw one token for each row. Return the tokens, and their log-probabilities.

        A log-probability is that under the distribution that the token was drawn from.

        Greedy rows take the first of the most likely tokens and report its log-probability at temperature 1.

        Args:
            logits_NV: This rank's logits, [N, V_local] fp32; changed in place.

        Raises:
            EngineError: a row has NaN or infinite logits, or a rank did not take part.
        """
        if rows.filters is not None:
            self._filter(logits_NV, rows.scale_N, rows.filters)
        drawn = self._drawing.draw(DrawInputs(logits_NV, rows.greedy_N, rows.scale_N, uniforms_N, self._vocab_size))
        if not np.isfinite(drawn.totals_N).all():
            raise EngineError("the logits are not finite; were the last weights?")
        return drawn.tokens_N.tolist(), (np.log(drawn.weights_N) - np.log(drawn.totals_N)).tolist()

    def _filter(self, logits_NV: torch.Tensor, scale_N: torch.Tensor, filters: _Filters) -> None:
        """Set the logits that top-k, top-p and min-p cut off to -inf."""
        own_nV = logits_NV[filters.rows_n]
        logits_nV = whole_rows(self._collective, own_nV, self._vocab_size)
        scores_nV = (logits_nV - logits_nV.amax(-1, keepdim=True)).mul_(scale_N[filters.rows_n, None])
        cut_nV = _filter_scores(scores_nV, filters.top_k_n, filters.top_p_n, filters.min_p_n) == -torch.inf
        rank, width = self._collective.rank, logits_NV.shape[1]
        count = own_tokens(rank, width, self._vocab_size)
        own_nV[:, :count].masked_fill_(cut_nV[:, rank * width : rank * width + count], -torch.inf)
        logits_NV[filters.rows_n] = own_nV


def _filter_scores(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set scores [n, V] that top-k, then top-p, then min-p cut off to -inf; ties at the k-th place are kept."""
    if bool((top_k > 0).any()):
        k = torch.where(top_k > 0, top_k, scores.shape[1]).clamp_max(scores.shape[1])
        some = (k < scores.shape[1]).nonzero()[:, 0]
        if len(some):
            ordered = scores[some].topk(int(k[some].max())).values
            threshold = ordered.gather(1, k[some, None] - 1)
            scores[some] = scores[some].masked_fill(scores[some] < threshold, -torch.inf)
    some = (top_p < 1).nonzero()[:, 0]
    if len(some):
        scores[some] = _top_p(scores[some], top_p[some])
    if bool((min_p > 0).any()):
        ratio = (scores - scores.amax(-1, keepdim=True)).exp_()
        scores = scores.masked_fill(ratio < min_p[:, None], -torch.inf)
    return scores


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each token whose more likely tokens have less than `top_p` together.

    This looks only at the few tokens that are most likely, and at more where they do not reach `top_p`.
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
