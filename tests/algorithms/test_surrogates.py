"""Surrogates by hand: their value, their gradient, and what lies outside the mask."""

import math
from collections.abc import Callable

import pytest
import torch

from tailrace.algorithms.loss_inputs import LossInputs
from tailrace.algorithms.surrogates import MOST_LOG_RATIO, Surrogate, clipped, sequence_clipped, weight_clipped

ALL: tuple[Callable[..., Surrogate], ...] = (clipped, sequence_clipped, weight_clipped)


def inputs(
    ratios: list[float], advantages: list[float], samples: list[int] | None = None, mask: list[float] | None = None
) -> LossInputs:
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    return LossInputs(
        log_probs_N=(old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_log_probs_N=old,
        columns_N={"advantages": torch.tensor(advantages, dtype=torch.float64)},
        mask_N=torch.tensor(mask or [1.0] * len(ratios), dtype=torch.float64),
        sample_N=torch.tensor(samples or [0] * len(ratios)),
        samples=max(samples or [0]) + 1,
    )


def gradient(of: LossInputs, surrogate: Surrogate) -> list[float]:
    return [float(one) for one in torch.autograd.grad(surrogate.loss_N.sum(), of.log_probs_N)[0]]


def test_a_response_has_the_geometric_mean_of_its_ratios() -> None:
    of = inputs([2.0, 0.5, 3.0, 3.0], [1.0, 1.0, -1.0, -1.0], samples=[0, 0, 1, 1])
    found = sequence_clipped(of, clip_low=0.5, clip_high=10.0)
    assert found.ratio_N.tolist() == pytest.approx([1.0, 1.0, 3.0, 3.0])
    assert found.loss_N.tolist() == pytest.approx([-1.0, -1.0, 3.0, 3.0])
    assert gradient(of, found) == pytest.approx([-1.0, -1.0, 3.0, 3.0])


def test_a_response_is_clipped_as_a_whole() -> None:
    of = inputs([4.0, 1.0, 0.25, 1.0], [1.0, 1.0, -1.0, -1.0], samples=[0, 0, 1, 1])
    found = sequence_clipped(of, clip_low=0.2, clip_high=0.28)  # the ratios are 2 and 0.5
    assert found.clipped_high_N.tolist() == [True, True, False, False]
    assert found.clipped_low_N.tolist() == [False, False, True, True]
    assert gradient(of, found) == [0.0, 0.0, 0.0, 0.0]


def test_tokens_outside_the_mask_are_not_in_the_mean_of_a_response() -> None:
    of = inputs([2.0, 50.0, 2.0], [1.0, 1.0, 1.0], mask=[1.0, 0.0, 1.0])
    assert sequence_clipped(of, clip_low=0.2, clip_high=9.0).ratio_N.tolist() == pytest.approx([2.0, 1.0, 2.0])


def test_a_clipped_weight_leaves_the_gradient() -> None:
    of = inputs([2.0, 0.1, 1.0], [1.0, -1.0, 0.5])
    found = weight_clipped(of, clip_low=0.5, clip_high=0.28)
    assert gradient(of, found) == pytest.approx([-1.28, 0.5, -0.5])
    assert found.clipped_high_N.tolist() == [True, False, False]
    assert found.clipped_low_N.tolist() == [False, True, False]


@pytest.mark.parametrize("surrogate", ALL)
def test_on_the_policy_all_have_the_gradient_of_the_policy(surrogate: Callable[..., Surrogate]) -> None:
    of = inputs([1.0, 1.0, 1.0], [1.0, -2.0, 0.5], samples=[0, 1, 1])
    found = surrogate(of, clip_low=0.2, clip_high=0.2)
    assert found.ratio_N.tolist() == [1.0, 1.0, 1.0]
    assert gradient(of, found) == [-1.0, 2.0, -0.5]


@pytest.mark.parametrize("surrogate", ALL)
def test_nothing_outside_the_mask_reaches_loss_or_gradient(surrogate: Callable[..., Surrogate]) -> None:
    of = inputs([1.1, math.nan, 0.9], [1.0, math.nan, -1.0], mask=[1.0, 0.0, 1.0])
    found = surrogate(of, clip_low=0.2, clip_high=0.2)
    assert found.loss_N.isfinite().all()
    slope = gradient(of, found)
    assert all(map(math.isfinite, slope))
    assert slope[1] == 0.0


@pytest.mark.parametrize("surrogate", ALL)
def test_a_ratio_that_would_overflow_is_bounded(surrogate: Callable[..., Surrogate]) -> None:
    of = inputs([1.0], [-1.0])
    of.old_log_probs_N.fill_(-800.0)
    found = surrogate(of, clip_low=0.2, clip_high=1e6)
    assert found.loss_N.isfinite().all()
    assert found.ratio_N.item() <= math.exp(MOST_LOG_RATIO) * 1.001
    assert math.isfinite(gradient(of, found)[0])
