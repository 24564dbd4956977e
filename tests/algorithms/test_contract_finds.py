"""The contract of losses finds losses that break it."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.losses import aggregate, masked_sum
from tailrace.algorithms.surrogates import clipped
from tailrace.config.algorithm import LossAggMode
from tailrace.conformance.loss import LossContract, PolicyLossContract
from tailrace.conformance.loss_cases import ClosedForm

Loss = Callable[[LossInputs], LossOutput]


def right(inputs: LossInputs, *, mode: LossAggMode = "token-mean") -> LossOutput:
    """The clipped surrogate, token by token."""
    loss_N = clipped(inputs, clip_low=0.2, clip_high=0.2).loss_N
    loss_sum, denominator = aggregate(loss_N, inputs, mode)
    tokens = inputs.mask_N.sum().item()
    return LossOutput(loss_sum=loss_sum, denominator=denominator, metrics={"tokens": tokens})


def averaged(inputs: LossInputs) -> LossOutput:
    """A loss that divides by the tokens of its micro-batch."""
    output = right(inputs)
    return replace(output, loss_sum=output.loss_sum / max(output.denominator, 1.0), denominator=1.0)


def weighted_by_place(inputs: LossInputs) -> LossOutput:
    """A loss that trusts the first samples of a micro-batch more."""
    weights_N = inputs.mask_N / (1 + inputs.sample_N)
    loss_N = clipped(inputs, clip_low=0.2, clip_high=0.2).loss_N
    return replace(right(inputs), loss_sum=masked_sum(loss_N, weights_N))


def masked_late(inputs: LossInputs) -> LossOutput:
    """A loss whose sum is masked, and whose gradient is not: 0 times what is no number."""
    ratio_N = (inputs.log_probs_N - inputs.old_log_probs_N).exp()
    return replace(right(inputs), loss_sum=masked_sum(-ratio_N * inputs.advantages_N, inputs.mask_N))


def counting_all(inputs: LossInputs) -> LossOutput:
    """A loss that divides by all tokens, whatever the mask says."""
    return replace(right(inputs), denominator=float(len(inputs.mask_N)))


def unbounded(inputs: LossInputs) -> LossOutput:
    """A loss whose ratio overflows."""
    masked = inputs.mask_N > 0
    log_ratio_N = torch.where(masked, inputs.log_probs_N - inputs.old_log_probs_N, 0.0)
    loss_N = -log_ratio_N.exp() * torch.where(masked, inputs.advantages_N, 0.0)
    return replace(right(inputs), loss_sum=loss_N.sum())


def upside_down(inputs: LossInputs) -> LossOutput:
    """A loss that makes rewarded responses less likely."""
    output = right(inputs)
    return replace(output, loss_sum=-output.loss_sum)


def rounded(inputs: LossInputs) -> LossOutput:
    """A loss that reports a ratio of half the precision."""
    output = right(inputs)
    return replace(output, metrics={**output.metrics, "ratio": output.metrics["tokens"] * (1 + 1e-7)})


def unclipped(inputs: LossInputs) -> LossOutput:
    """A loss without clipping, where the closed form clips."""
    loss_N = clipped(inputs, clip_low=1.0, clip_high=math.inf).loss_N
    return replace(right(inputs), loss_sum=masked_sum(loss_N, inputs.mask_N))


def moody(inputs: LossInputs) -> LossOutput:
    """A loss that changes what it is given."""
    output = right(inputs)
    inputs.old_log_probs_N.mul_(2)
    return output


class Contract(PolicyLossContract):
    """The contract of one of the losses above, which claim to be PPO's."""

    closed_form = ClosedForm(surrogate="clipped")

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def loss(self, inputs: LossInputs) -> LossOutput:
        return self._loss(inputs)


Check = Callable[[PolicyLossContract], None]
CHECKS: dict[str, Check] = {
    "split": lambda c: c.test_every_split_into_micro_batches_and_ranks_adds_up_to_the_whole(0),
    "order": lambda c: c.test_the_order_of_samples_does_not_matter(0),
    "padding": lambda c: c.test_padding_changes_nothing(0.0),
    "mask": lambda c: c.test_no_value_outside_the_mask_reaches_loss_gradient_or_metrics(math.nan),
    "empty": lambda c: c.test_a_batch_without_a_token_of_the_mask_has_no_loss_and_no_denominator(),
    "ratio": lambda c: c.test_on_the_policy_the_ratio_is_exactly_1(),
    "policy": lambda c: c.test_on_the_policy_the_gradient_is_that_of_the_policy(0),
    "closed form": lambda c: c.test_loss_and_gradient_equal_the_closed_form(0),
    "extreme": lambda c: c.test_extreme_ratios_give_finite_numbers("old_log_probs"),
    "pure": lambda c: c.test_the_loss_is_a_pure_function(),
}
FOUND_BY: dict[Loss, str] = {
    averaged: "split",
    weighted_by_place: "order",
    counting_all: "padding",
    masked_late: "mask",
    rounded: "ratio",
    upside_down: "policy",
    partial(right, mode="seq-mean-token-mean"): "policy",
    unclipped: "closed form",
    unbounded: "extreme",
    moody: "pure",
}


@pytest.mark.parametrize("loss", FOUND_BY, ids=lambda loss: getattr(loss, "__name__", "another aggregation"))
def test_a_loss_that_breaks_the_contract_is_found(loss: Loss) -> None:
    with pytest.raises(AssertionError):
        CHECKS[FOUND_BY[loss]](Contract(loss))


@pytest.mark.parametrize("check", CHECKS)
def test_a_loss_that_is_right_passes(check: str) -> None:
    CHECKS[check](Contract(right))


def test_a_contract_without_a_loss_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"LossContract\.loss is missing"):
        LossContract().test_the_loss_is_a_pure_function()
