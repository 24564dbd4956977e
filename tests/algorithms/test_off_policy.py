"""Importance weights and rejection by hand, and that what is rejected is as if it had never been in the batch."""

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
from tailrace.algorithms.off_policy import importance_weights, without_rejected
from tailrace.config.algorithm import (
    GrpoConfig,
    GspoConfig,
    KlBound,
    LossAggMode,
    MaskedCorrection,
    NoCorrection,
    RatioBounds,
    RatioLevel,
    RolloutCorrection,
    RolloutRejection,
    TruncatedCorrection,
)
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import learned, small_run, steps_of, write_prompts

CORRECTIONS: tuple[RolloutCorrection, ...] = (
    NoCorrection(),
    TruncatedCorrection(),
    TruncatedCorrection(level="geometric"),
    TruncatedCorrection(level="sequence"),
    MaskedCorrection(),
    MaskedCorrection(level="sequence"),
)
MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def stale(
    ratios: list[float], mask: list[float] | None = None, *, samples: list[int] | None = None, advantage: float = 1.0
) -> LossInputs:
    """Loss inputs whose old log-probabilities exceed the rollout's by log `ratios`."""
    rollout = torch.full((len(ratios),), -2.0)
    old = rollout + torch.tensor(ratios).log()
    return LossInputs(
        log_probs_N=old.clone().requires_grad_(),
        old_log_probs_N=old,
        mask_N=torch.tensor(mask or [1.0] * len(ratios)),
        sample_N=torch.tensor(samples or [0] * len(ratios)),
        samples=max(samples or [0]) + 1,
        columns_N={"advantages": torch.full((len(ratios),), advantage), "rollout_log_probs": rollout},
    )


def sampled_at(inputs: LossInputs, log_probs: torch.Tensor | None) -> LossInputs:
    """A copy of `inputs` with other rollout log-probabilities, or with none."""
    others = {} if log_probs is None else {"rollout_log_probs": log_probs}
    return replace(inputs, columns_N={"advantages": inputs.advantages_N, **others})


def corrected(
    inputs: LossInputs, correction: RolloutCorrection | None = None, rejection: RolloutRejection | None = None
) -> LossOutput:
    correction = correction or TruncatedCorrection()
    return Grpo(GrpoConfig(rollout_correction=correction, rollout_rejection=rejection)).loss(inputs)


def weights(inputs: LossInputs, correction: TruncatedCorrection | MaskedCorrection) -> list[float]:
    return importance_weights(inputs, correction).weight_N.tolist()


@given(ratios=st.lists(st.floats(2**-10, 2**10, width=32), min_size=1, max_size=9), limit=st.floats(1, 100))
def test_the_factor_is_the_ratio_up_to_the_limit(ratios: list[float], limit: float) -> None:
    found = importance_weights(stale(ratios), TruncatedCorrection(limit=limit))
    expected = torch.tensor(ratios).clamp(max=limit)
    torch.testing.assert_close(found.weight_N, expected, rtol=1e-4, atol=1e-6)
    assert (found.weight_N <= limit).all()
    assert (found.bounded_N <= (found.weight_N == torch.tensor(limit, dtype=torch.float32))).all()


RATIOS, SAMPLES = [4.0, 0.25, 8.0, 2.0, 1.0], [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TruncatedCorrection(limit=3.0), [3.0, 0.25, 3.0, 2.0, 1.0]),
        (TruncatedCorrection(limit=3.0, level="geometric"), [1.0, 1.0, 16 ** (1 / 3), 16 ** (1 / 3), 16 ** (1 / 3)]),
        (TruncatedCorrection(limit=3.0, level="sequence"), [1.0, 1.0, 3.0, 3.0, 3.0]),
        (TruncatedCorrection(limit=99.0, level="sequence"), [1.0, 1.0, 16.0, 16.0, 16.0]),
        (MaskedCorrection(lower=0.5, upper=5.0), [4.0, 0.0, 0.0, 2.0, 1.0]),
        (MaskedCorrection(lower=0.0, upper=5.0), [4.0, 0.25, 0.0, 2.0, 1.0]),
        (MaskedCorrection(level="geometric", upper=2.0), [1.0, 1.0, 0.0, 0.0, 0.0]),
        (MaskedCorrection(level="sequence", upper=16.5), [1.0, 1.0, 16.0, 16.0, 16.0]),
        (MaskedCorrection(level="sequence", upper=15.5), [1.0, 1.0, 0.0, 0.0, 0.0]),
    ],
    ids=str,
)
def test_weights_of_tokens_geometric_means_and_products(
    correction: TruncatedCorrection | MaskedCorrection, expected: list[float]
) -> None:
    expected = [min(weight, getattr(correction, "limit", 99.0)) for weight in expected]
    assert weights(stale(RATIOS, samples=SAMPLES), correction) == pytest.approx(expected, rel=1e-5)


def test_tokens_outside_the_mask_are_in_no_mean_and_no_product() -> None:
    inputs = stale([2.0, 50.0, 8.0], [1.0, 0.0, 1.0])
    assert weights(inputs, TruncatedCorrection(level="geometric", limit=99.0)) == pytest.approx([4.0, 1.0, 4.0])
    assert weights(inputs, TruncatedCorrection(level="sequence", limit=99.0)) == pytest.approx([16.0, 1.0, 16.0])


def test_what_is_masked_has_no_gradient_and_stays_in_the_denominator() -> None:
    inputs = stale([0.25, 1.0, 8.0])
    output = corrected(inputs, MaskedCorrection(lower=0.5, upper=5.0))
    assert output.loss_sum.item() == pytest.approx(-1.0)
    assert output.denominator == 3
    gradient = torch.autograd.grad(output.loss_sum, inputs.log_probs_N)[0]
    assert gradient.tolist() == pytest.approx([0.0, -1.0, 0.0])
    assert output.metrics["correction_masked"] == 2


LN2, LN4, LN8 = (math.log(number) for number in (2, 4, 8))


@pytest.mark.parametrize(
    ("reject", "kept"),
    [
        (RatioBounds(level="token", lower=0.5, upper=5.0), [1, 0, 0, 1, 1]),
        (RatioBounds(level="token", lower=0.0, upper=5.0), [1, 1, 0, 1, 1]),
        (RatioBounds(level="geometric", upper=2.5), [1, 1, 0, 0, 0]),
        (RatioBounds(level="geometric", upper=2.6), [1, 1, 1, 1, 1]),
        (RatioBounds(), [1, 1, 0, 0, 0]),
        (RatioBounds(upper=16.5), [1, 1, 1, 1, 1]),
        # k1 = -log r, k2 = (log r)² / 2, k3 = r - 1 - log r
        (KlBound(estimator="k1", level="token", upper=1.0), [1, 0, 1, 1, 1]),
        (KlBound(estimator="k1", level="sequence", upper=0.001), [1, 1, 1, 1, 1]),
        (KlBound(estimator="k2", level="token", upper=LN4**2 / 2 + 0.01), [1, 1, 0, 1, 1]),
        (KlBound(estimator="k2", level="geometric", upper=LN4**2 / 2 + 0.01), [1, 1, 1, 1, 1]),
        (KlBound(estimator="k3", level="sequence", upper=3 - LN4 - 0.75 + LN4 + 0.01), [1, 1, 0, 0, 0]),
        (KlBound(estimator="k3", level="sequence", upper=3 - LN4 - 0.75 + LN4 - 0.01), [0, 0, 0, 0, 0]),
        (KlBound(estimator="k3", level="geometric", upper=(7 - LN8 + 1 - LN2) / 3 + 0.01), [1, 1, 1, 1, 1]),
        (KlBound(estimator="k3", level="geometric", upper=(7 - LN8 + 1 - LN2) / 3 - 0.01), [1, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_rejection_of_tokens_and_responses(reject: RolloutRejection, kept: list[int]) -> None:
    assert without_rejected(stale(RATIOS, samples=SAMPLES), reject).mask_N.tolist() == kept


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [GrpoConfig, GspoConfig])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("reject", [RatioBounds(), RatioBounds(level="token"), KlBound(upper=0.5)], ids=str)
def test_what_is_rejected_is_as_if_its_mask_had_been_0(
    mode: LossAggMode,
    make: type[GrpoConfig | GspoConfig],
    correction: RolloutCorrection,
    reject: RolloutRejection,
) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = stale([1.0, 0.9, 1.1, 30.0, 1.0, 1.2, 0.1, 1.0], samples=[0, 0, 1, 1, 2, 2, 2, 2])
    inputs = replace(inputs, log_probs_N=inputs.log_probs_N + torch.randn(8, generator=generator) * 0.1)
    kept = without_rejected(inputs, reject)
    rejecting, plain = (
        make(loss_agg_mode=mode, loss_norm_tokens=5, rollout_correction=correction, rollout_rejection=one)
        for one in (reject, None)
    )
    found, expected = Grpo(rejecting).loss(inputs), Grpo(plain).loss(kept)
    assert 0 < expected.metrics["tokens"] < 8
    assert found.denominator == expected.denominator
    assert found.metrics["tokens"] == expected.metrics["tokens"]
    torch.testing.assert_close(found.loss_sum, expected.loss_sum)
    slopes = [torch.autograd.grad(output.loss_sum, inputs.log_probs_N)[0] for output in (found, expected)]
    torch.testing.assert_close(slopes[0], slopes[1])
    assert not slopes[0][kept.mask_N == 0].any()


def test_what_is_rejected_is_counted() -> None:
    inputs = stale([*RATIOS, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0, 0.0], samples=[*SAMPLES, 2])
    found = corrected(inputs, NoCorrection(), RatioBounds(level="token", lower=0.0, upper=5.0)).metrics
    assert (found["rejected_tokens"], found["measured_tokens"], found["tokens"]) == (1, 5, 4)
    assert (found["rejected_samples"], found["measured_samples"]) == (0, 2)
    found = corrected(inputs, NoCorrection(), RatioBounds()).metrics
    assert (found["rejected_tokens"], found["measured_tokens"], found["tokens"]) == (3, 5, 2)
    assert (found["rejected_samples"], found["measured_samples"]) == (1, 2)
    assert not {"rejected_tokens", "measured_samples"} & corrected(inputs).metrics.keys()


def test_a_batch_that_is_rejected_as_a_whole_has_no_loss_and_no_denominator() -> None:
    inputs = stale([9.0, 9.0])
    output = corrected(inputs, TruncatedCorrection(), RatioBounds())
    assert (output.loss_sum.item(), output.denominator, output.metrics["tokens"]) == (0.0, 0.0, 0.0)
    assert not torch.autograd.grad(output.loss_sum, inputs.log_probs_N)[0].any()
    assert output.metrics["rollout_mismatch"] == pytest.approx(2 * math.log(9))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
@pytest.mark.parametrize("reject", [RatioBounds, KlBound])
def test_what_the_engine_cannot_have_sampled_is_rejected_and_leaves_no_trace(
    value: float, level: RatioLevel, reject: type[RatioBounds | KlBound]
) -> None:
    inputs = stale([1.0, 1.0, 1.0], samples=[0, 0, 1])
    assert inputs.rollout_log_probs_N is not None
    broken = sampled_at(inputs, torch.tensor([value, -2.0, -2.0]))
    for correction in CORRECTIONS:
        output = corrected(broken, correction, reject(level=level))
        kept = 2.0 if level == "token" else 1.0
        assert output.denominator == kept
        assert output.loss_sum.item() == pytest.approx(-kept)
        assert torch.autograd.grad(output.loss_sum, inputs.log_probs_N)[0].isfinite().all()


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
    assert not importance_weights(tied, TruncatedCorrection()).weight_N.requires_grad


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
    assert weights(poisoned, TruncatedCorrection()) == [0.5, 1.0]


def test_tokens_that_the_engine_held_for_impossible_get_the_limit() -> None:
    inputs = sampled_at(stale([1.0]), torch.tensor([float("-inf")]))
    assert weights(inputs, TruncatedCorrection()) == [2.0]
    assert weights(inputs, MaskedCorrection()) == [0.0]


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


def test_a_run_that_rejects_everything_goes_on_and_says_why(tmp_path: Path, tiny_model: TinyModel) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    rejection = {"type": "kl", "upper": 1e-30}
    changes: dict[str, Any] = {"algorithm__rollout_rejection": rejection, "trainer__steps": 2}
    assert train(small_run(tmp_path / "run", tiny_model("llama"), prompts, **changes), resume=False) == 0
    for step in steps_of(tmp_path / "run"):
        assert (step.metrics["rejected_tokens"], step.metrics["rejected_samples"]) == (1.0, 1.0)
        assert 0 < step.metrics["rollout_mismatch"] < 1e-3
        assert step.metrics["skipped_updates"] == 1
        assert not {"loss", "grad_norm", "ratio"} & step.metrics.keys()


def test_missing_log_probs_of_the_engine_name_the_fix() -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.rollout_correction\.type to none"):
        corrected(sampled_at(stale([1.0]), None))
