"""Advantages and value loss of PPO, by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.gae import adapted_lambda, gae
from tailrace.algorithms.loss_inputs import LossInputs
from tailrace.algorithms.table import Compute
from tailrace.algorithms.value_loss import value_loss, with_explained_variance
from tailrace.config.algorithm import KlConfig, PpoConfig


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_the_advantage_of_each_token_by_hand() -> None:
    # errors: 0 + 0.5 * 2 - 1 = 0, 0 + 0.5 * 4 - 2 = 0, 8 - 4 = 4; then A = error + 0.5 * 0.5 * the next
    found = gae(floats(0, 0, 8), floats(1, 2, 4), floats(1, 1, 1), discount=0.5, gae_lambda=0.5)
    assert found.tolist() == [0.25, 1.0, 4.0]


def test_tokens_outside_the_mask_are_passed_over() -> None:
    of_own = gae(floats(0, 8), floats(1, 4), floats(1, 1), discount=0.5, gae_lambda=0.5)
    holed = gae(floats(0, 99, 8), floats(1, math.nan, 4), floats(1, 0, 1), discount=0.5, gae_lambda=0.5)
    assert holed.tolist() == [of_own[0], 0.0, of_own[1]]


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=20))
def test_lambda_1_makes_the_return_and_lambda_0_the_error(steps: list[tuple[float, float]]) -> None:
    rewards, values = (floats(*column) for column in zip(*steps, strict=True))
    mask = np.ones(len(rewards), np.float32)
    long = gae(rewards, values, mask, discount=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(long + values, np.cumsum(rewards[::-1])[::-1], atol=1e-4)
    short = gae(rewards, values, mask, discount=1.0, gae_lambda=0.0)
    np.testing.assert_allclose(short, rewards + np.append(values[1:], 0) - values, atol=1e-4)


def test_lambda_of_a_long_response_is_nearer_to_1() -> None:
    assert adapted_lambda(1000, 0.05) == 0.98
    assert adapted_lambda(40, 0.05) == 0.5
    assert adapted_lambda(3, 0.05) == 0.0


def estimated(config: PpoConfig, *rows: dict[str, object]) -> list[dict[str, list[float]]]:
    (work,) = (task.work for task in make_algorithm(config).tasks if task.name == "advantage")
    assert isinstance(work, Compute)
    return [{name: np.asarray(cell).tolist() for name, cell in cells.items()} for cells in work.function(rows)]


PLAIN = PpoConfig(normalize_advantages=False, gae_lambda=1.0)


def test_the_reward_comes_with_the_last_token_of_the_mask() -> None:
    row = {"reward": 3.0, "response_mask": floats(1, 1, 0), "values": floats(1, 2, 7)}
    assert estimated(PLAIN, row) == [{"advantages": [2.0, 1.0, 0.0], "returns": [3.0, 3.0, 0.0]}]


def test_a_penalty_comes_off_at_each_token() -> None:
    config = PLAIN.model_copy(update={"kl": KlConfig(coefficient=0.5, estimator="k1", part_of="reward")})
    log_probs = {"rollout_log_probs": floats(-1, -1), "ref_log_probs": floats(-2, -3)}
    row = {"reward": 3.0, "response_mask": floats(1, 1), "values": floats(0, 0), **log_probs}
    assert estimated(config, row)[0]["returns"] == [3.0 - 0.5 - 1.0, 3.0 - 1.0]


def test_the_critic_may_learn_with_another_lambda() -> None:
    config = PpoConfig(normalize_advantages=False, gae_lambda=0.0, critic_gae_lambda=1.0)
    row = {"reward": 3.0, "response_mask": floats(1, 1), "values": floats(1, 2)}
    assert estimated(config, row) == [{"advantages": [1.0, 1.0], "returns": [3.0, 3.0]}]


def test_a_row_whose_grading_failed_counts_for_nothing() -> None:
    rows = [
        {"reward": reward, "response_mask": floats(1, 1), "values": floats(0, 0)} for reward in (1.0, math.nan, 3.0)
    ]
    low, failed, high = estimated(PpoConfig(gae_lambda=1.0, advantage_eps=1e-12), *rows)
    assert failed["advantages"] == [0.0, 0.0]
    assert high["advantages"] == pytest.approx([0.75**0.5] * 2)  # 1, 1, 3, 3: the variance is 4 / 3
    assert low["advantages"] == pytest.approx([-(0.75**0.5)] * 2)


def inputs(values: list[float], before: list[float], returns: list[float], mask: list[float]) -> LossInputs:
    now = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    return LossInputs(
        log_probs_N=now,
        old_log_probs_N=now.detach(),
        mask_N=torch.tensor(mask, dtype=torch.float64),
        sample_N=torch.zeros(len(values), dtype=torch.int64),
        samples=1,
        columns_N={"values": torch.tensor(before), "returns": torch.tensor(returns)},
    )


def test_a_value_that_has_moved_far_has_no_gradient() -> None:
    # moved by 2 towards the return of 3: clipped at 0.5, where the error is larger; moved away: not clipped
    of = inputs([2.0, -2.0, 0.25, math.nan], [0.0, 0.0, 0.0, math.nan], [3.0, 3.0, 3.0, math.nan], [1, 1, 1, 0])
    output = value_loss(of, clip=0.5)
    assert output.loss_sum.item() == pytest.approx((2.5**2 + 5**2 + 2.75**2) / 2)
    slope = torch.autograd.grad(output.loss_sum, of.log_probs_N)[0]
    assert slope.tolist() == [0.0, -5.0, -2.75, 0.0]
    assert output.denominator == 3
    assert output.metrics["value_clip_fraction"] == 1


def test_rounding_makes_no_value_count_as_clipped() -> None:
    random = torch.Generator().manual_seed(0)
    values, before, returns = torch.randn((3, 2000), generator=random, dtype=torch.float64).tolist()
    of = inputs(values, before, returns, [1] * 2000)
    assert value_loss(of, clip=100.0).metrics["value_clip_fraction"] == 0


def test_explained_variance_is_that_of_the_values_before() -> None:
    output = value_loss(inputs([0, 0, 0, 0], [1.0, 2.0, 3.0, 9.0], [1.0, 3.0, 5.0, 0.0], [1, 1, 1, 0]), clip=None)
    means = {name: value / output.metrics["tokens"] for name, value in output.metrics.items()}
    found = with_explained_variance(means)
    assert found["explained_variance"] == pytest.approx(1 - (2 / 3) / (8 / 3))
    assert found["return"] == 3.0
    assert "value_error_square" not in found
    same = with_explained_variance({"return": 1.0, "return_square": 1.0, "value_error": 0.0, "value_error_square": 0.0})
    assert same == {"return": 1.0}
