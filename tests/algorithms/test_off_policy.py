import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.off_policy import truncated_importance
from tailrace.config.algorithm import GrpoConfig, NoCorrection, TruncatedCorrection
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import learned, small_run, steps_of, write_prompts


def stale(ratios: list[float], mask: list[float] | None = None) -> LossInputs:
    """Loss inputs whose old log-probabilities exceed the rollout's by log `ratios`; all advantages are 1."""
    rollout = torch.full((len(ratios),), -2.0)
    old = rollout + torch.tensor(ratios).log()
    return LossInputs(
        log_probs_N=old.clone().requires_grad_(),
        old_log_probs_N=old,
        mask_N=torch.tensor(mask or [1.0] * len(ratios)),
        sample_N=torch.zeros(len(ratios), dtype=torch.int64),
        samples=1,
        columns_N={"advantages": torch.ones(len(ratios)), "rollout_log_probs": rollout},
    )


def sampled_at(inputs: LossInputs, log_probs: torch.Tensor | None) -> LossInputs:
    """A copy of `inputs` with other rollout log-probabilities, or with none."""
    others = {} if log_probs is None else {"rollout_log_probs": log_probs}
    return replace(inputs, columns_N={"advantages": inputs.advantages_N, **others})


def corrected(inputs: LossInputs, limit: float = 2.0) -> LossOutput:
    return Grpo(GrpoConfig(rollout_correction=TruncatedCorrection(limit=limit))).loss(inputs)


@given(ratios=st.lists(st.floats(2**-10, 2**10, width=32), min_size=1, max_size=9), limit=st.floats(1, 100))
def test_the_factor_is_the_ratio_up_to_the_limit(ratios: list[float], limit: float) -> None:
    found = truncated_importance(stale(ratios), limit=limit)
    expected = torch.tensor(ratios).clamp(max=limit)
    torch.testing.assert_close(found.weight_N, expected, rtol=1e-4, atol=1e-6)
    assert (found.weight_N <= limit).all()
    assert (found.truncated_N <= (found.weight_N == torch.tensor(limit, dtype=torch.float32))).all()


def test_the_factor_scales_loss_and_gradient_and_has_no_gradient_of_its_own() -> None:
    inputs = stale([0.5, 1.0, 8.0])
    output = corrected(inputs)
    assert output.loss_sum.item() == pytest.approx(-(0.5 + 1.0 + 2.0))
    assert output.denominator == 3
    gradient = torch.autograd.grad(output.loss_sum, inputs.log_probs_N)[0]
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -1.0, -2.0]))


def test_old_log_probs_that_are_the_current_ones_get_no_gradient_through_the_factor() -> None:
    inputs = stale([0.5, 8.0])
    tied = replace(inputs, old_log_probs_N=inputs.log_probs_N)
    assert not truncated_importance(tied, limit=2.0).weight_N.requires_grad


def test_tokens_of_the_old_weights_count_as_without_a_correction() -> None:
    inputs = stale([1.0, 1.0])
    assert corrected(inputs).loss_sum.item() == Grpo(GrpoConfig()).loss(inputs).loss_sum.item()


@pytest.mark.parametrize("config", [GrpoConfig(), GrpoConfig(rollout_correction=NoCorrection())])
def test_without_a_correction_stale_tokens_count_in_full_and_none_is_reported(config: GrpoConfig) -> None:
    output = Grpo(config).loss(stale([0.5, 8.0]))
    assert output.loss_sum.item() == -2.0
    assert not {"correction_weight", "correction_truncated"} & output.metrics.keys()


def test_metrics_are_sums_of_the_factors_and_of_the_truncated_tokens() -> None:
    metrics = corrected(stale([0.5, 8.0, 9.0, 100.0], [1.0, 1.0, 1.0, 0.0])).metrics
    assert metrics["correction_weight"] == pytest.approx(0.5 + 2 + 2)
    assert metrics["correction_truncated"] == 2
    assert metrics["rollout_mismatch"] == pytest.approx(math.log(2) + math.log(8) + math.log(9))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_what_the_engine_says_of_tokens_outside_the_mask_counts_for_nothing(value: float) -> None:
    inputs = stale([0.5, 1.0], [1.0, 0.0])
    assert inputs.rollout_log_probs_N is not None
    poisoned = sampled_at(inputs, torch.tensor([-2.0, value]))
    assert corrected(poisoned).loss_sum.item() == corrected(inputs).loss_sum.item()
    assert truncated_importance(poisoned, limit=2.0).weight_N.tolist() == [0.5, 1.0]


def test_tokens_that_the_engine_held_for_impossible_get_the_limit() -> None:
    inputs = sampled_at(stale([1.0]), torch.tensor([float("-inf")]))
    assert truncated_importance(inputs, limit=2.0).weight_N.tolist() == [2.0]


def test_a_run_corrects_as_its_recipe_says_and_by_default_not_at_all(tmp_path: Path, tiny_model: TinyModel) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    corrections: dict[str, Any] = {"default": None, "none": {"type": "none"}, "truncated": {"type": "truncated"}}
    steps = {}
    for name, correction in corrections.items():
        run = tmp_path / name
        changes: dict[str, Any] = {"algorithm__rollout_correction": correction, "trainer__steps": 2}
        train(small_run(run, tiny_model("llama"), prompts, **changes), resume=False)
        steps[name] = [learned(event) for event in steps_of(run)]
    assert steps["default"] == steps["none"]
    assert all(step.pop("correction_weight") == pytest.approx(1.0, abs=1e-3) for step in steps["truncated"])
    assert [step.pop("correction_truncated") for step in steps["truncated"]] == [0.0, 0.0]
    assert all(step.keys() == plain.keys() for step, plain in zip(steps["truncated"], steps["none"], strict=True))


def test_missing_log_probs_of_the_engine_name_the_fix() -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.rollout_correction\.type to none"):
        corrected(sampled_at(stale([1.0]), None))
