"""Drawing tokens from logits, in PyTorch and in C++, on one rank and on several."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.collectives.rendezvous import rendezvous
from tailrace.engine.collectives.shared_memory import SharedMemoryCollective
from tailrace.engine.kernels.build import VECTORS
from tailrace.engine.sampling.cpu import CpuDrawing
from tailrace.engine.sampling.drawing import BLOCK, Drawing, DrawInputs, Drawn, TorchDrawing
from tailrace.host.cpu import cpu_flags

needs_vectors = pytest.mark.skipif(not cpu_flags() >= set(VECTORS), reason="this CPU has no AVX2")
both = pytest.mark.parametrize("make", [TorchDrawing, pytest.param(CpuDrawing, marks=needs_vectors)])

MakeDrawing = Callable[[Collective], Drawing]


def logits_of(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).normal(0, 6, (rows, vocabulary)).astype(np.float32))


def draw(
    make: MakeDrawing,
    logits_NV: torch.Tensor,
    scale_N: torch.Tensor,
    uniforms_N: np.ndarray,
    *,
    greedy: bool = False,
    collective: Collective | None = None,
) -> Drawn:
    """Draw from full rows of logits. Each rank of the `collective` draws from its share."""
    collective = collective or Alone()
    rows, vocabulary = logits_NV.shape
    width = -(-vocabulary // (BLOCK * collective.size)) * BLOCK
    padded = torch.full((rows, width * collective.size), torch.nan)  # padding may hold anything
    padded[:, :vocabulary] = logits_NV
    own = padded[:, collective.rank * width : (collective.rank + 1) * width].contiguous()
    return make(collective).draw(DrawInputs(own, torch.full((rows,), greedy), scale_N, uniforms_N, vocabulary))


@both
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 7), (1, 256), (3, 1000), (70, 700), (7, 49152)])
def test_a_token_is_where_the_cumulative_weights_pass_its_number(make: MakeDrawing, rows: int, vocabulary: int) -> None:
    logits, scale = logits_of(rows, vocabulary), torch.linspace(0.5, 2.0, rows)
    logits[0, vocabulary // 2 :] = -torch.inf
    numbers = np.linspace(0, 1 - 1e-12, rows)
    tokens, found, totals = draw(make, logits, scale, numbers)
    shifted = (logits - logits.amax(-1, keepdim=True)) * scale[:, None]
    weights = np.exp(shifted.numpy().astype(np.float64))
    every = np.arange(rows)
    np.testing.assert_allclose(totals, weights.sum(-1), rtol=1e-6)
    np.testing.assert_allclose(found, weights[every, tokens], rtol=1e-6)
    upto, slack = weights.cumsum(-1)[every, tokens], 1e-6 * totals
    assert (found > 0).all()
    assert (upto - found - slack <= numbers * totals).all()
    assert (numbers * totals <= upto + slack).all()


@both
def test_greedy_rows_take_the_first_of_the_likeliest(make: MakeDrawing) -> None:
    logits = torch.zeros(2, 700)
    logits[0, [537, 320, 600]] = 5.0
    tokens, weights, _ = draw(make, logits, torch.ones(2), np.array([0.9, 0.9]), greedy=True)
    assert tokens.tolist() == [320, 0]
    assert weights.tolist() == [1.0, 1.0]


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_make_totals_that_are_not(make: MakeDrawing, bad: float) -> None:
    logits = logits_of(3, 700)
    logits[1, 300] = bad
    totals = draw(make, logits, torch.ones(3), np.array([0.1, 0.5, 0.9])).totals_N
    assert np.isfinite(totals).tolist() == [True, False, True]


@needs_vectors
def test_both_implementations_agree() -> None:
    logits, scale = logits_of(50, 2048), torch.linspace(0.3, 3.0, 50)
    numbers = np.random.default_rng(0).random(50)
    ours, theirs = draw(CpuDrawing, logits, scale, numbers), draw(TorchDrawing, logits, scale, numbers)
    assert ours.tokens_N.tolist() == theirs.tokens_N.tolist()
    np.testing.assert_allclose(ours.weights_N / ours.totals_N, theirs.weights_N / theirs.totals_N, rtol=1e-6)


@both
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("vocabulary", [10, 256, 1000, 2600])
def test_every_rank_draws_what_one_rank_draws_bit_for_bit(make: MakeDrawing, ranks: int, vocabulary: int) -> None:
    logits, scale = (logits_of(9, vocabulary) * 4).round() / 4, torch.linspace(0.5, 2.0, 9)  # with many ties
    numbers = np.random.default_rng(1).random(9)
    expected = [array.tolist() for array in draw(make, logits, scale, numbers)]

    with rendezvous() as place, ThreadPoolExecutor(ranks) as threads:

        def on_rank(rank: int) -> Drawn:
            collective = SharedMemoryCollective(rank, ranks, place.memory, 20.0)
            drawn = draw(make, logits, scale, numbers, collective=collective)
            collective.close()
            return drawn

        results = list(threads.map(on_rank, range(ranks)))
    assert [[array.tolist() for array in drawn] for drawn in results] == [expected] * ranks
