"""From logits to tokens, with the log-probability of each, whatever the number of ranks that hold the vocabulary.

Temperature, top-k, top-p and min-p mean what they mean in transformers, in that order. A token is found by inverting
the cumulative distribution at one uniform number, which depends on the sample's seed and the token's position and on
nothing else, so a sample is the same whatever shares its batch.

Each rank sums the weights of its share of the vocabulary in blocks. All ranks gather the same sums, choose the same
block, and learn the token from the block's owner. Blocks begin at the same tokens whatever the number of ranks, so that
number changes no bit of the result. Only rows with a filter are gathered whole.

    maxima ─▶ all_gather ─▶ block sums ─▶ all_gather ─▶ choose a block ─▶ its owner finds the token ─▶ all_gather

On CUDA the host waits once, at the end, for rows without a filter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from tailrace.engine.collectives.base import Collective
from tailrace.engine.sharding import VOCAB_MULTIPLE
from tailrace.errors import EngineError

BLOCK = VOCAB_MULTIPLE
"""Vocabulary entries that are summed before the first search."""
FIRST_CANDIDATES = 256
"""Most likely tokens looked at for top-p before more are."""
CPU_ENTRIES = 2**16
"""Logits whose exponentials a CPU holds at a time: they stay in its cache."""

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


class Settings(Protocol):
    """How one token is drawn: a `Draw`, a `SamplingConfig`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of N rows, as columns."""

    greedy_N: torch.Tensor
    """bool"""
    scale_N: torch.Tensor
    """fp32, 1 / temperature; 1 for greedy rows"""
    filters: "_Filters | None"
    """Of the rows that have one, if there are any."""

    @classmethod
    def of(cls, rows: Sequence[Settings], device: torch.device) -> Self:
        """The settings of a batch."""
        greedy = torch.tensor([row.temperature == 0 for row in rows], device=device)
        scale = [1 / max(row.temperature, 1e-30) if row.temperature else 1.0 for row in rows]
        return cls(greedy, torch.tensor(scale, device=device), _Filters.of(rows, device))


@dataclass(frozen=True, slots=True)
class _Filters:
    """What cuts tokens off, of n rows."""

    rows_n: torch.Tensor
    """int64, which rows these are"""
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


class Primitives(Protocol):
    """The passes over a rank's logits, [N, V_local] in fp32; V_local is a multiple of BLOCK.

    The weight of a logit is exp((logit - maximum) * scale), in fp32 and in this order.
    """

    def maxima(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row, [N] fp32, and the first index that has it, [N] int64."""

    def block_sums(self, logits_NV: torch.Tensor, maxima_N: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        """Summed weights of each block, [N, V_local / BLOCK] fp64; not finite where a weight is not.

        A sum depends on the logits of its block alone, bit for bit.
        """

    def choose(
        self, sums_NK: torch.Tensor, uniforms_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Invert the cumulative sums of K blocks at uniforms in [0, 1); all fp64.

        Returns:
            [N] each: the block, int64; how far into its sum the target lies; the total. Any block where sums are NaN.
        """

    def resolve(
        self,
        logits_NV: torch.Tensor,
        blocks_N: torch.Tensor,
        inside_N: torch.Tensor,
        maxima_N: torch.Tensor,
        scale_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Invert the cumulative weights of one block of each row, at `inside_N`.

        Returns:
            [N] each: the index of the logit in its row, int64; its weight, fp64.
        """


class TorchPrimitives:
    """On any device."""

    def maxima(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Primitives`. Block by block, because torch vectorizes a maximum but not one with its index."""
        maxima, blocks = logits_NV.view(len(logits_NV), -1, BLOCK).amax(-1).max(-1)
        return maxima, blocks * BLOCK + _block(logits_NV, blocks).argmax(-1)

    def block_sums(self, logits_NV: torch.Tensor, maxima_N: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        """See `Primitives`."""
        count, width = logits_NV.shape
        step = max(1, CPU_ENTRIES // width) if logits_NV.device.type == "cpu" else max(1, count)
        sums = logits_NV.new_empty(count, width // BLOCK)
        for first in range(0, count, step):
            rows = slice(first, first + step)
            weights = (logits_NV[rows] - maxima_N[rows, None]).mul_(scale_N[rows, None]).exp_()
            torch.sum(weights.view(len(weights), -1, BLOCK), -1, out=sums[rows])
        return sums.double()

    def choose(
        self, sums_NK: torch.Tensor, uniforms_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Primitives`."""
        cumulative_NK = sums_NK.cumsum(-1)
        total_N = cumulative_NK[:, -1]
        target_N = uniforms_N * total_N
        block_N = _first_above(cumulative_NK, target_N)
        before_N = (cumulative_NK - sums_NK).gather(1, block_N[:, None])[:, 0]
        return block_N, target_N - before_N, total_N

    def resolve(
        self,
        logits_NV: torch.Tensor,
        blocks_N: torch.Tensor,
        inside_N: torch.Tensor,
        maxima_N: torch.Tensor,
        scale_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Primitives`."""
        scores_NB = (_block(logits_NV, blocks_N) - maxima_N[:, None]).mul_(scale_N[:, None])
        weights_NB = scores_NB.exp_().double()
        index_N = _first_above(weights_NB.cumsum(-1), inside_N)
        return blocks_N * BLOCK + index_N, weights_NB.gather(1, index_N[:, None])[:, 0]


def _block(logits_NV: torch.Tensor, blocks_N: torch.Tensor) -> torch.Tensor:
    """[N, BLOCK], one block of each row."""
    rows = torch.arange(len(logits_NV), device=logits_NV.device)
    return logits_NV.view(len(logits_NV), -1, BLOCK)[rows, blocks_N]


class Sampler:
    """One rank's. Every rank calls `sample` with the same rows and gets the same result."""

    def __init__(self, vocab_size: int, collective: Collective, primitives: Primitives) -> None:
        """`vocab_size`: real tokens, of all ranks together."""
        self._vocab_size = vocab_size
        self._collective = collective
        self._primitives = primitives

    def sample(
        self, logits_NV: torch.Tensor, rows: SamplingRows, uniforms_N: npt.NDArray[np.float64]
    ) -> tuple[list[int], list[float]]:
        """One token for each row and its log-probability under the distribution that it was drawn from.

        Greedy rows take the first of the most likely tokens and report its log-probability at temperature 1.

        Args:
            logits_NV: [N, V_local] fp32, this rank's; changed in place.

        Raises:
            EngineError: a row has NaN or infinite logits, or a rank did not take part.
        """
        logits_NV[:, self._own_tokens(logits_NV) :] = -torch.inf
        self._filter(logits_NV, rows)
        maxima_N, likeliest_N = self._likeliest(logits_NV)
        sums_NK = self._whole_rows(self._primitives.block_sums(logits_NV, maxima_N, rows.scale_N), BLOCK)
        chosen = self._primitives.choose(sums_NK, torch.from_numpy(uniforms_N).to(logits_NV.device))
        block_N, inside_N, total_N = chosen
        drawn_N, weight_N = self._resolve(logits_NV, block_N, inside_N, maxima_N, rows.scale_N)
        token_N = torch.where(rows.greedy_N, likeliest_N, drawn_N).double()
        weight_N = torch.where(rows.greedy_N, 1.0, weight_N)
        tokens, weights, totals = torch.stack((token_N, weight_N, total_N)).cpu().numpy()
        if not np.isfinite(totals).all():
            raise EngineError("the logits are not finite; were the last weights?")
        return tokens.astype(np.int64).tolist(), (np.log(weights) - np.log(totals)).tolist()

    def _own_tokens(self, logits_NV: torch.Tensor) -> int:
        """How many of the logits belong to tokens; the others pad."""
        width = logits_NV.shape[1]
        return min(max(self._vocab_size - self._collective.rank * width, 0), width)

    def _whole_rows(self, part: torch.Tensor, entries: int) -> torch.Tensor:
        """Gather [N, X_local] to [N, X]. A column stands for `entries` tokens; columns that only pad are left out."""
        columns = -(-self._vocab_size // entries)
        if self._collective.size == 1:
            return part[:, :columns].contiguous()
        gathered = self._collective.all_gather(part.contiguous())
        return gathered.transpose(0, 1).flatten(1)[:, :columns].contiguous()

    def _filter(self, logits_NV: torch.Tensor, rows: SamplingRows) -> None:
        """Set what top-k, top-p and min-p cut off to -inf."""
        filters = rows.filters
        if filters is None:
            return
        own_nV = logits_NV[filters.rows_n]
        logits_nV = self._whole_rows(own_nV, 1)
        scores_nV = (logits_nV - logits_nV.amax(-1, keepdim=True)).mul_(rows.scale_N[filters.rows_n, None])
        cut_nV = _filter_scores(scores_nV, filters.top_k_n, filters.top_p_n, filters.min_p_n) == -torch.inf
        count, first = self._own_tokens(logits_NV), self._collective.rank * logits_NV.shape[1]
        own_nV[:, :count].masked_fill_(cut_nV[:, first : first + count], -torch.inf)
        logits_NV[filters.rows_n] = own_nV

    def _likeliest(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit [N] fp32 and the first token that has it [N] int64, over all ranks."""
        largest_N, index_N = self._primitives.maxima(logits_NV)
        if self._collective.size == 1:
            return largest_N, index_N
        tokens_N = index_N + self._collective.rank * logits_NV.shape[1]
        found_R2N = self._collective.all_gather(torch.stack((largest_N.double(), tokens_N.double())))
        maxima_N, rank_N = found_R2N[:, 0].max(0)
        return maxima_N.float(), found_R2N[:, 1].gather(0, rank_N[None])[0].long()

    def _resolve(
        self,
        logits_NV: torch.Tensor,
        block_N: torch.Tensor,
        inside_N: torch.Tensor,
        maxima_N: torch.Tensor,
        scale_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token at `inside_N` of the block's weights, [N] int64, and its weight, [N] fp64. Its owner finds it."""
        if self._collective.size == 1:
            return self._primitives.resolve(logits_NV, block_N, inside_N, maxima_N, scale_N)
        blocks, rank = logits_NV.shape[1] // BLOCK, self._collective.rank
        own_N = (block_N - rank * blocks).clamp(0, blocks - 1)
        index_N, weight_N = self._primitives.resolve(logits_NV, own_N, inside_N, maxima_N, scale_N)
        token_N = index_N + rank * logits_NV.shape[1]
        found_R2N = self._collective.all_gather(torch.stack((token_N.double(), weight_N)))
        owner_N = torch.div(block_N, blocks, rounding_mode="floor")
        token_N, weight_N = found_R2N.gather(0, owner_N.expand(1, 2, -1))[0]
        return token_N.long(), weight_N


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[N], the first index whose cumulative weight exceeds the target, so one of positive weight.

    Targets are kept just below the total, which rounding might let them reach. Any index where weights are NaN.
    """
    total = cumulative[:, -1]
    below = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total))).clamp_min(0)
    return torch.searchsorted(cumulative, below[:, None], right=True)[:, 0].clamp_max(cumulative.shape[1] - 1)


def _filter_scores(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Scores [n, V] with -inf for what top-k, then top-p, then min-p cut off; ties at the k-th place are kept."""
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
