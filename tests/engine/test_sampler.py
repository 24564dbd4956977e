"""Sampling: transformers' warpers are the oracle."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tailrace.config.engine import SamplingConfig
from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.sampling.drawing import BLOCK, TorchDrawing
from tailrace.engine.sampling.sampler import Sampler, SamplingRows, uniforms
from tailrace.errors import EngineError
from tests.engine.thread_ranks import run_ranks

CPU = torch.device("cpu")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


Drawn = tuple[list[int], list[float]]


def sample(
    logits: torch.Tensor, rows: SamplingRows, draws: np.ndarray, *, collective: Collective | None = None
) -> Drawn:
    """Draw from full rows of logits. Each rank of the `collective` draws from its share."""
    collective = collective or Alone()
    count, vocabulary = logits.shape
    width = -(-vocabulary // (BLOCK * collective.size)) * BLOCK
    shares = torch.full((count, width * collective.size), torch.nan)  # padding may hold anything
    shares[:, :vocabulary] = logits
    own = shares[:, collective.rank * width : (collective.rank + 1) * width].contiguous()
    return Sampler(vocabulary, collective, TorchDrawing(collective)).sample(own, rows, draws)


def logits_of(rows: int, vocabulary: int, *, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * scale


def processed(logits: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    """Log-probabilities [N, V] by transformers' warpers, in the order in which `generate` applies them."""
    warpers = LogitsProcessorList()
    if config.temperature != 1:
        warpers.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(config.min_p))
    nothing = torch.LongTensor(len(logits), 1)
    return warpers(nothing, torch.FloatTensor(logits)).log_softmax(-1)


def quantiles(distribution: torch.Tensor, draws: np.ndarray) -> list[int]:
    """The tokens found by inverting the exact cumulative distribution."""
    cumulative = distribution.double().exp().cumsum(-1).numpy()
    found = np.searchsorted(cumulative, draws * cumulative[-1], side="right")
    return [int(token) for token in np.minimum(found, len(cumulative) - 1)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
def test_tokens_and_log_probs_follow_transformers_warpers(setting: dict[str, Any], vocabulary: int) -> None:
    config = SamplingConfig(**setting)
    logits = logits_of(1, vocabulary)
    expected = processed(logits, config)[0]
    draws = (np.arange(500) + 0.5) / 500
    tokens, log_probs = sample(logits.expand(500, -1), SamplingRows.of([config] * 500, CPU), draws)
    assert tokens == quantiles(expected, draws)
    np.testing.assert_allclose(log_probs, expected[tokens], atol=1e-4)


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            SamplingConfig,
            temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            top_k=st.sampled_from([0, 3, 20, 400]),
            top_p=st.sampled_from([0.2, 0.8, 0.99, 1.0]),
            min_p=st.sampled_from([0.0, 0.02, 0.5]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_of_a_batch_do_not_touch_each_other(configs: list[SamplingConfig]) -> None:
    logits = logits_of(len(configs), 300)
    draws = uniforms(range(len(configs)), [4] * len(configs))
    tokens, log_probs = sample(logits, SamplingRows.of(configs, CPU), draws)
    for row, config in enumerate(configs):
        if config.temperature == 0:
            assert tokens[row] == int(logits[row].argmax())
            expected = logits[row].log_softmax(-1)
        else:
            expected = processed(logits[row : row + 1], config)[0]
            assert tokens[row] == quantiles(expected, draws[row : row + 1])[0]
        assert log_probs[row] == pytest.approx(float(expected[tokens[row]]), abs=1e-4)


def test_a_flat_distribution_under_top_p_looks_beyond_the_first_candidates() -> None:
    vocabulary, config = 20_000, SamplingConfig(top_p=0.7)
    draws = (np.arange(50) + 0.5) / 50
    rows = SamplingRows.of([config] * 50, CPU)
    tokens, log_probs = sample(logits_of(1, vocabulary, scale=0.1).expand(50, -1), rows, draws)
    expected = processed(logits_of(1, vocabulary, scale=0.1), config)[0]
    assert tokens == quantiles(expected, draws)
    np.testing.assert_allclose(log_probs, expected[tokens], atol=1e-3)


def test_frequencies_pass_a_chi_square_test() -> None:
    draws, logits = 20_000, logits_of(1, 12, scale=1.0)
    tokens, _ = sample(
        logits.expand(draws, -1),
        SamplingRows.of([SamplingConfig()] * draws, CPU),
        uniforms([draw // 200 for draw in range(draws)], [draw % 200 for draw in range(draws)]),
    )
    expected = logits[0].softmax(-1).numpy() * draws
    statistic = float((((np.bincount(tokens, minlength=12) - expected) ** 2) / expected).sum())
    assert statistic < 31.3, "the 99.9 % quantile for 11 degrees of freedom"


def test_uniforms_depend_on_seed_and_position_alone_and_look_uniform() -> None:
    seeds, positions = [3, -1, 2**70 + 3, 8], [0, 5, 0, 5]
    together = uniforms(seeds, positions)
    assert together.tolist() == [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    grid = uniforms([i // 300 for i in range(90_000)], [i % 300 for i in range(90_000)])
    assert len(np.unique(grid)) == 90_000
    assert abs(np.histogram(grid, 20, (0, 1))[0] - 4500).max() < 5 * 4500**0.5
    square = grid.reshape(300, 300)
    for shifted in (square[1:, :] - square[:-1, :], square[:, 1:] - square[:, :-1]):
        assert abs(shifted.var() - 1 / 6) < 0.01, "neighbouring seeds and positions are independent"


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_give_possible_tokens(draw: float) -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, 300:320] = 1.0
    tokens, _ = sample(logits, SamplingRows.of([SamplingConfig()], CPU), np.array([draw]))
    assert tokens == [300 if draw == 0 else 319]


def test_nan_logits_are_an_error() -> None:
    with pytest.raises(EngineError, match="not finite"):
        sample(torch.full((1, 9), torch.nan), SamplingRows.of([SamplingConfig()], CPU), np.array([0.5]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_one_logit_that_is_not_finite_is_an_error_on_every_rank(setting: dict[str, Any], value: float) -> None:
    logits = logits_of(3, 700)
    logits[1, 300] = value
    rows = SamplingRows.of([SamplingConfig(**setting)] * 3, CPU)

    def attempt(collective: Collective) -> bool:
        with pytest.raises(EngineError, match="not finite"):
            sample(logits, rows, np.full(3, 0.5), collective=collective)
        return True

    assert run_ranks(1, attempt) == [True]
    assert run_ranks(2, attempt) == [True, True]


@settings(max_examples=40)
@given(
    configs=st.lists(
        st.builds(
            SamplingConfig,
            temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            top_k=st.sampled_from([0, 1, 20, 400]),
            top_p=st.sampled_from([0.2, 0.99, 1.0]),
            min_p=st.sampled_from([0.0, 0.02]),
        ),
        min_size=1,
        max_size=5,
    ),
    vocabulary=st.sampled_from([3, 256, 300, 1000, 2600]),
    rounding=st.sampled_from([1.0, 8.0]),
    seed=st.integers(0, 9),
    tp=st.integers(2, 4),
)
def test_every_rank_draws_what_one_rank_draws_bit_for_bit(
    configs: list[SamplingConfig], vocabulary: int, rounding: float, seed: int, tp: int
) -> None:
    logits = (logits_of(len(configs), vocabulary) * rounding).round() / rounding  # with many ties
    rows = SamplingRows.of(configs, CPU)
    draws = uniforms(range(seed, seed + len(configs)), [4] * len(configs))
    whole = sample(logits, rows, draws)
    assert run_ranks(tp, lambda collective: sample(logits, rows, draws, collective=collective)) == [whole] * tp


def test_greedy_takes_the_first_of_the_most_likely_tokens() -> None:
    logits = torch.zeros(2, 1100)
    logits[0, [270, 271, 900]] = 5.0
    rows = SamplingRows.of([SamplingConfig(temperature=0.0)] * 2, CPU)
    for tp in (1, 2, 4):
        for tokens, log_probs in run_ranks(
            tp, lambda collective: sample(logits, rows, np.array([0.9, 0.9]), collective=collective)
        ):
            assert tokens == [270, 0]
            assert log_probs == pytest.approx(logits.log_softmax(-1)[[0, 1], [270, 0]].tolist(), abs=1e-6)


def test_the_lowest_temperature_is_nearly_greedy() -> None:
    logits = logits_of(1, 700)
    rows = SamplingRows.of([SamplingConfig(temperature=0.001, top_p=0.9)], CPU)
    assert sample(logits, rows, np.array([0.7])) == ([int(logits.argmax())], [0.0])
