"""The oracle is a padded implementation in the layout and with the formulas of verl's `compute_policy_loss`."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput, is_maximum
from tailrace.algorithms.losses import policy_loss
from tailrace.algorithms.surrogates import clipped
from tailrace.config.algorithm import (
    AdaptiveKl,
    KlConfig,
    LossAggMode,
    NoCorrection,
    RolloutCorrection,
    TruncatedCorrection,
)

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
LOW, HIGH = 0.2, 0.28
LENGTHS = (6, 4, 1, 5)


def padded_batch() -> dict[str, torch.Tensor]:
    """A batch of [4, 6] tensors: row 2 has no trainable token, and row 0 has a hole in its mask."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    log_probs = torch.randn(shape, generator=generator) * 0.3 - 1
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).float()
    mask[0, 2] = 0
    mask[2] = 0
    return {
        "log_probs": log_probs.requires_grad_(),
        "old": log_probs.detach() + torch.randn(shape, generator=generator) * 0.3,
        "ref": log_probs.detach() + torch.randn(shape, generator=generator) * 0.3,
        "rollout": log_probs.detach() + torch.randn(shape, generator=generator) * 0.6,
        "advantages": torch.tensor([1.2, -0.7, 5.0, 0.4])[:, None].expand(shape),
        "mask": mask,
    }


def packed(batch: Mapping[str, torch.Tensor]) -> LossInputs:
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return LossInputs(
        log_probs_N=batch["log_probs"][real],
        old_log_probs_N=batch["old"][real],
        mask_N=batch["mask"][real],
        sample_N=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        samples=len(LENGTHS),
        columns_N={
            "advantages": batch["advantages"][real],
            "ref_log_probs": batch["ref"][real],
            "rollout_log_probs": batch["rollout"][real],
        },
    )


def loss_of(
    inputs: LossInputs,
    mode: LossAggMode = "token-mean",
    kl: KlConfig | None = None,
    correction: RolloutCorrection | None = None,
) -> LossOutput:
    return policy_loss(
        inputs,
        partial(clipped, clip_low=LOW, clip_high=HIGH),
        mode=mode,
        kl=kl or KlConfig(),
        correction=correction or NoCorrection(),
    )


def oracle(
    batch: Mapping[str, torch.Tensor], mode: LossAggMode, coefficient: float, limit: float | None = None
) -> torch.Tensor:
    ratio = (batch["log_probs"] - batch["old"]).exp()
    plain, clipped = -batch["advantages"] * ratio, -batch["advantages"] * ratio.clamp(1 - LOW, 1 + HIGH)
    log_r = batch["ref"] - batch["log_probs"]
    token_loss = torch.maximum(plain, clipped)
    if limit is not None:  # the importance weights of verl's rollout correction, per token
        token_loss = token_loss * (batch["old"] - batch["rollout"]).exp().clamp(max=limit)
    token_loss = token_loss + coefficient * (log_r.exp() - log_r - 1)
    mask = batch["mask"]
    rows = mask.sum(1) > 0
    sums = (token_loss * mask).sum(1)[rows]
    if mode == "token-mean":
        return sums.sum() / mask.sum()
    return (sums / mask.sum(1)[rows]).mean() if mode == "seq-mean-token-mean" else sums.mean()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("limit", [None, 1.0, 2.0])
def test_loss_and_gradient_equal_the_padded_oracle(mode: LossAggMode, coefficient: float, limit: float | None) -> None:
    batch = padded_batch()
    expected = oracle(batch, mode, coefficient, limit)
    correction = None if limit is None else TruncatedCorrection(limit=limit)
    output = loss_of(packed(batch), mode, KlConfig(coefficient=coefficient), correction)
    loss = output.loss_sum / output.denominator
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(value, batch["log_probs"])[0] for value in (loss, expected))
    torch.testing.assert_close(found, wanted)


def test_an_adaptive_penalty_has_the_coefficient_of_each_row() -> None:
    batch = padded_batch()
    inputs = packed(batch)
    kl = KlConfig(coefficient=0.9, adaptive=AdaptiveKl(target=0.1))
    inputs = replace(inputs, columns_N={**inputs.columns_N, "kl_coefficient": torch.full((16,), 0.3)})
    output = loss_of(inputs, kl=kl)
    torch.testing.assert_close(output.loss_sum / output.denominator, oracle(batch, "token-mean", 0.3))
    assert output.metrics["kl_coefficient"] / output.metrics["tokens"] == pytest.approx(0.3)


def test_denominators_count_the_tokens_and_samples_that_are_trained_on() -> None:
    inputs = packed(padded_batch())
    assert [loss_of(inputs, mode).denominator for mode in MODES] == [14.0, 3.0, 3.0]


@pytest.mark.parametrize("mode", MODES)
def test_sums_over_parts_of_a_batch_add_up_to_those_of_the_whole(mode: LossAggMode) -> None:
    inputs = packed(padded_batch())
    kl = KlConfig(coefficient=0.1)
    first = inputs.sample_N < 2
    parts = [loss_of(select(inputs, tokens), mode, kl, TruncatedCorrection()) for tokens in (first, ~first)]
    whole = loss_of(inputs, mode, kl, TruncatedCorrection())
    torch.testing.assert_close(parts[0].loss_sum + parts[1].loss_sum, whole.loss_sum)
    assert parts[0].denominator + parts[1].denominator == whole.denominator
    for name, value in whole.metrics.items():
        add = max if is_maximum(name) else operator.add
        assert add(parts[0].metrics[name], parts[1].metrics[name]) == pytest.approx(value, rel=1e-6, abs=1e-6), name


def select(inputs: LossInputs, tokens: torch.Tensor) -> LossInputs:
    tensors: dict[str, Any] = {
        name: getattr(inputs, name)[tokens] for name in ("log_probs_N", "old_log_probs_N", "mask_N")
    }
    tensors["columns_N"] = {name: values[tokens] for name, values in inputs.columns_N.items()}
    samples = torch.unique(inputs.sample_N[tokens], return_inverse=True)[1]
    return replace(inputs, **tensors, sample_N=samples, samples=int(samples.max()) + 1)


def tokens(ratios: list[float], advantages: list[float], mask: list[float] | None = None) -> LossInputs:
    old = torch.full((len(ratios),), -1.0)
    return LossInputs(
        log_probs_N=(old + torch.tensor(ratios).log()).requires_grad_(),
        old_log_probs_N=old,
        columns_N={"advantages": torch.tensor(advantages)},
        mask_N=torch.tensor(mask or [1.0] * len(ratios)),
        sample_N=torch.zeros(len(ratios), dtype=torch.int64),
        samples=1,
    )


def test_clipping_takes_the_gradient_only_where_the_ratio_has_gone_too_far_already() -> None:
    inputs = tokens([1.5, 1.5, 0.5, 0.5, 1.25], [1.0, -1.0, 1.0, -1.0, 1.0])
    output = loss_of(inputs)
    gradient = torch.autograd.grad(output.loss_sum, inputs.log_probs_N)[0]
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.5, -0.5, 0.0, -1.25]))
    assert output.loss_sum.item() == pytest.approx(-1.28 + 1.5 - 0.5 + 0.8 - 1.25)
    assert output.metrics["clip_fraction_high"] == 1.0
    assert output.metrics["clip_fraction_low"] == 1.0


def test_metrics_are_sums_over_the_mask() -> None:
    metrics = loss_of(tokens([1.5, 0.5, 9.0], [1.0, 2.0, 3.0], [1.0, 1.0, 0.0])).metrics
    assert metrics["tokens"] == 2
    assert metrics["ratio"] == pytest.approx(2.0)
    assert metrics["policy_loss"] == pytest.approx(-1.28 - 1.0)
    logs = torch.tensor([1.5, 0.5]).log()
    assert metrics["approx_kl"] == pytest.approx(float((logs.exp() - 1 - logs).sum()))
    assert "ref_kl" not in metrics


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(value: float, mode: LossAggMode) -> None:
    batch = padded_batch()
    kl = KlConfig(coefficient=0.1)
    clean = loss_of(packed(batch), mode, kl, TruncatedCorrection())
    inputs = packed(batch)
    outside = inputs.mask_N == 0

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().masked_fill(outside, value)

    log_probs = poisoned(inputs.log_probs_N).requires_grad_()
    columns = {name: poisoned(values) for name, values in inputs.columns_N.items()}
    old = poisoned(inputs.old_log_probs_N)
    output = loss_of(
        replace(inputs, log_probs_N=log_probs, old_log_probs_N=old, columns_N=columns), mode, kl, TruncatedCorrection()
    )
    torch.testing.assert_close(output.loss_sum, clean.loss_sum)
    assert output.metrics == clean.metrics
    gradient = torch.autograd.grad(output.loss_sum, log_probs)[0]
    assert torch.isfinite(gradient).all()
    assert not gradient[outside].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_trained_tokens_has_neither_loss_nor_denominator(mode: LossAggMode) -> None:
    output = loss_of(tokens([2.0, 0.5], [1.0, 1.0], [0.0, 0.0]), mode)
    assert output.loss_sum.item() == 0
    assert output.denominator == 0


def test_a_penalty_without_reference_names_the_fix() -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.kl\.coefficient to 0"):
        loss_of(tokens([1.0], [1.0]), kl=KlConfig(coefficient=0.1))
