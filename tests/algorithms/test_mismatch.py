"""How far a batch is off the policy, by hand: the sums of a loss, and the figures that a step shows."""

import math
from typing import Any

import pytest
import torch

from tailrace.algorithms.figures import step_figures
from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs
from tailrace.algorithms.surrogates import MOST_LOG_RATIO
from tailrace.config.algorithm import (
    GrpoConfig,
    MaskedCorrection,
    RatioBounds,
    TruncatedCorrection,
)

OLD = [0.5, 0.25, 0.5, 0.9]
ROLLOUT = [0.4, 0.5, 0.5, 0.1]
"""Probabilities. The first two tokens are of one response, which newer weights made than those of the second."""


def batch(
    old: list[float] = OLD,
    rollout: list[float] = ROLLOUT,
    *,
    mask: list[float] | None = None,
    on_policy: list[float] | None = None,
) -> LossInputs:
    log_probs = torch.tensor(old, dtype=torch.float64).log()
    return LossInputs(
        log_probs_N=log_probs.clone().requires_grad_(),
        old_log_probs_N=log_probs,
        mask_N=torch.tensor(mask or [1.0] * len(old), dtype=torch.float64),
        sample_N=torch.arange(len(old)) // 2,
        samples=(len(old) + 1) // 2,
        columns_N={
            "advantages": torch.ones(len(old), dtype=torch.float64),
            "rollout_log_probs": torch.tensor(rollout, dtype=torch.float64).log(),
        },
        on_policy_N=None if on_policy is None else torch.tensor(on_policy, dtype=torch.float64),
    )


def sums(inputs: LossInputs, **config: Any) -> dict[str, float]:
    return Grpo(GrpoConfig(**config)).loss(inputs).metrics


def means(sums: dict[str, float]) -> dict[str, float]:
    """The metrics of an optimizer step, as a trainer makes them."""
    kept = ("tokens", "rollout_probs_diff_max", "on_policy_probs_diff_max")
    return {name: value if name in kept else value / (sums["tokens"] or 1) for name, value in sums.items()}


def figures(*batches: LossInputs, **config: Any) -> dict[str, float]:
    updates = [means(sums(inputs, **config)) for inputs in batches]
    applied = [update for update in updates if update["tokens"]]
    return step_figures(applied, [update for update in updates if not update["tokens"]])


def test_the_distance_of_engine_and_trainer_in_nats_and_in_probabilities() -> None:
    found = figures(batch())
    diffs = [0.1, 0.25, 0.0, 0.8]
    ratios = [1.25, 0.5, 1.0, 9.0]
    assert found["rollout_mismatch"] == pytest.approx(sum(abs(math.log(ratio)) for ratio in ratios) / 4)
    assert found["rollout_kl"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 4)
    assert found["rollout_probs_diff_mean"] == pytest.approx(sum(diffs) / 4)
    assert found["rollout_probs_diff_max"] == pytest.approx(0.8)
    assert found["rollout_probs_diff_std"] == pytest.approx(torch.tensor(diffs).std(correction=0).item())
    assert found["effective_sample_size"] == pytest.approx((sum(ratios) / 4) ** 2 / (sum(r * r for r in ratios) / 4))
    assert not {name for name in found if name.startswith("on_policy") or "squared" in name or "measured" in name}


def test_what_is_stale_is_apart_from_what_the_engine_computes_otherwise() -> None:
    found = figures(batch(on_policy=[1.0, 1.0, 0.0, 0.0]))
    assert found["on_policy"] == 0.5
    assert found["on_policy_mismatch"] == pytest.approx((math.log(1.25) + math.log(2)) / 2)
    assert found["on_policy_kl"] == pytest.approx((0.25 - math.log(1.25) - 0.5 + math.log(2)) / 2)
    assert found["on_policy_probs_diff_mean"] == pytest.approx(0.175)
    assert found["on_policy_probs_diff_std"] == pytest.approx(0.075)
    assert found["on_policy_probs_diff_max"] == pytest.approx(0.25)
    assert found["rollout_probs_diff_max"] == pytest.approx(0.8)


def test_a_batch_without_a_response_of_its_weights_has_nothing_on_the_policy() -> None:
    found = figures(batch(on_policy=[0.0] * 4))
    assert found["on_policy"] == 0.0
    assert not {"on_policy_mismatch", "on_policy_kl", "on_policy_probs_diff_mean"} & found.keys()


def test_the_optimizer_steps_of_a_step_are_pooled() -> None:
    parts = batch(OLD[:2], ROLLOUT[:2], on_policy=[1.0, 1.0]), batch(OLD[2:], ROLLOUT[2:], on_policy=[0.0, 0.0])
    whole = figures(batch(on_policy=[1.0, 1.0, 0.0, 0.0]))
    found = figures(*parts)
    assert {**found, "tokens": 4.0} == pytest.approx(whole)


def test_the_effective_sample_size_is_that_of_the_weights() -> None:
    found = figures(batch(), rollout_correction=TruncatedCorrection(limit=2.0))  # 1.25, 0.5, 1, 2
    assert found["correction_weight"] == pytest.approx(4.75 / 4)
    assert found["effective_sample_size"] == pytest.approx((4.75 / 4) ** 2 / (6.8125 / 4))
    found = figures(batch(), rollout_correction=MaskedCorrection(lower=0.6, upper=5.0))  # 1.25, 0, 1, 0
    assert found["effective_sample_size"] == pytest.approx((2.25 / 4) ** 2 / (2.5625 / 4))
    assert figures(batch(OLD, OLD))["effective_sample_size"] == pytest.approx(1.0)


def test_rejection_hides_no_mismatch_and_is_a_part_of_all() -> None:
    found = figures(batch(), rollout_rejection=RatioBounds(level="token", upper=2.0))
    plain = figures(batch())
    assert (found["rejected_tokens"], found["rejected_samples"], found["tokens"]) == (0.25, 0.0, 3.0)
    assert (found["policy_loss"], found["ratio"]) == (-1.0, 1.0)
    for name in plain:
        if name.startswith("rollout"):
            assert found[name] == pytest.approx(plain[name]), name


def test_a_step_of_which_nothing_is_left_still_tells_why() -> None:
    lost = batch([0.9, 0.9], [0.1, 0.1])
    assert figures(lost, rollout_rejection=RatioBounds()) == pytest.approx(
        {
            "rollout_mismatch": math.log(9),
            "rollout_kl": 8 - math.log(9),
            "rollout_probs_diff_mean": 0.8,
            "rollout_probs_diff_std": 0.0,
            "rollout_probs_diff_max": 0.8,
            "effective_sample_size": 1.0,
            "rejected_tokens": 1.0,
            "rejected_samples": 1.0,
        },
        abs=1e-7,
    )
    kept = batch([0.5, 0.5], [0.5, 0.5])
    both = figures(lost, kept, rollout_rejection=RatioBounds())
    assert (both["rejected_tokens"], both["tokens"]) == (0.5, 2.0)
    assert both["rollout_probs_diff_mean"] == pytest.approx(0.4)


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_tokens_outside_the_mask_are_not_measured(value: float) -> None:
    inputs = batch([*OLD, value], [*ROLLOUT, value], mask=[1.0] * 4 + [0.0], on_policy=[1.0, 1.0, 0.0, 0.0, 1.0])
    assert figures(inputs) == pytest.approx(figures(batch(on_policy=[1.0, 1.0, 0.0, 0.0])))


def test_a_token_that_the_engine_held_for_impossible_is_counted_and_bounded() -> None:
    found = figures(batch([0.5, 0.5], [0.0, 0.5]))
    assert found["rollout_overflow"] == 0.5
    assert found["rollout_kl"] == pytest.approx((math.exp(MOST_LOG_RATIO) - 1 - MOST_LOG_RATIO) / 2)
    assert found["effective_sample_size"] == pytest.approx(0.5)
    assert "rollout_overflow" not in figures(batch())
