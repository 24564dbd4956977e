"""The contract of every loss, as tests. They need no model, and take a second.

class TestMyAlgorithm(PolicyLossContract):
    algorithm = MyAlgorithm(group_size=4)
    closed_form = ClosedForm(mode="token-mean")
"""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.config.columns import ColumnKind
from tailrace.conformance.loss_cases import (
    ClosedForm,
    Computed,
    Sample,
    added,
    compute,
    draw_samples,
    far_apart,
    masked_as,
    on_policy,
    pack,
    padded,
    tensors,
)

JUNK = (math.nan, math.inf, -math.inf, 1e30)
"""Values outside the mask."""


class LossContract:
    """Subclass it and write `loss`, for a loss of any model. Every test is a promise that a trainer relies on."""

    dtype: ClassVar[torch.dtype] = torch.float64
    tolerance: ClassVar[float] = 1e-9
    """The allowed difference of sums, gradients and metrics, both relative and absolute."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss under test."""
        raise NotImplementedError(f"{type(self).__name__}.loss is missing: call the loss under test there")

    def columns(self) -> Iterable[str]:
        """Columns of the loss beside those of `loss_cases.COLUMNS`. They get numbers from 0 to 1."""
        return ()

    def batch(self, seed: int) -> list[Sample]:
        """Draw a batch off the policy."""
        return draw_samples(seed, self.columns(), self.dtype)

    @pytest.mark.parametrize("seed", range(2))
    def test_every_split_into_micro_batches_and_ranks_adds_up_to_the_whole(self, seed: int) -> None:
        """Sums, gradients, denominators and metrics of the parts add up, however a batch is split."""
        samples, order = self.batch(seed), random.Random(seed)
        whole = compute(self.loss, samples)
        cuts = [sorted(order.sample(range(1, len(samples)), parts)) for parts in (1, 2)]
        for cut in (*cuts, range(1, len(samples))):
            ends = [0, *cut, len(samples)]
            parts = [samples[start:end] for start, end in pairwise(ends)]
            self.assert_equal(added([compute(self.loss, part) for part in parts]), whole)

    @pytest.mark.parametrize("seed", range(2))
    def test_the_order_of_samples_does_not_matter(self, seed: int) -> None:
        """Each sample has the same gradient at every place of a batch."""
        samples = self.batch(seed)
        places = random.Random(seed).sample(range(len(samples)), len(samples))
        found = compute(self.loss, [samples[place] for place in places])
        whole = compute(self.loss, samples)
        gradients = tuple(whole.gradients[place] for place in places)
        self.assert_equal(found, replace(whole, gradients=gradients))

    @pytest.mark.parametrize("value", [0.0, *JUNK])
    def test_padding_changes_nothing(self, value: float) -> None:
        """Tokens outside the mask, and samples of such tokens alone, count for nothing wherever they are."""
        samples = self.batch(seed=0)
        longer, places = padded(samples, value, seed=1)
        found = compute(self.loss, longer)
        own = [gradient[place] for gradient, place in zip(found.gradients, places, strict=True)]
        self.assert_equal(replace(found, gradients=tuple(own[:-1])), compute(self.loss, samples))
        assert not found.gradient[pack(longer).mask_N == 0].any(), "a token outside the mask has a gradient"

    @pytest.mark.parametrize("value", JUNK)
    def test_no_value_outside_the_mask_reaches_loss_gradient_or_metrics(self, value: float) -> None:
        """What stands in for a token outside the mask changes not one bit."""
        samples = self.batch(seed=0)
        found, expected = compute(self.loss, masked_as(samples, value)), compute(self.loss, masked_as(samples, 0.0))
        assert found.loss_sum == expected.loss_sum
        assert found.metrics == expected.metrics
        assert torch.equal(found.gradient, expected.gradient)

    def test_a_batch_without_a_token_of_the_mask_has_no_loss_and_no_denominator(self) -> None:
        """The sum, the denominator and the gradient of such a batch are 0."""
        found = compute(self.loss, [{**sample, "mask": sample["mask"] * 0} for sample in self.batch(seed=0)])
        assert (found.loss_sum, found.denominator, found.metrics["tokens"]) == (0, 0, 0)
        assert not found.gradient.any()
        assert all(map(math.isfinite, found.metrics.values()))

    @pytest.mark.parametrize("of", ["log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs"])
    def test_extreme_ratios_give_finite_numbers(self, of: str) -> None:
        """A ratio that would overflow leaves loss, gradient and metrics finite."""
        for samples in far_apart(self.batch(seed=0), of):
            found = compute(self.loss, samples)
            assert math.isfinite(found.loss_sum)
            assert found.gradient.isfinite().all()
            assert [name for name, value in found.metrics.items() if not math.isfinite(value)] == []

    def test_the_loss_is_a_pure_function(self) -> None:
        """The same inputs give the same result, and stay as they are."""
        inputs = pack(self.batch(seed=0))
        before = {name: tensor.detach().clone() for name, tensor in tensors(inputs).items()}
        first, second = self.loss(inputs), self.loss(inputs)
        assert torch.equal(first.loss_sum, second.loss_sum)
        assert (first.denominator, first.metrics) == (second.denominator, second.metrics)
        for name, tensor in tensors(inputs).items():
            assert torch.equal(tensor, before[name]), f"the loss has changed {name}"

    def assert_equal(self, found: Computed, expected: Computed) -> None:
        """Check that two results are equal up to rounding."""
        assert found.denominator == self.near(expected.denominator)
        assert found.loss_sum == self.near(expected.loss_sum)
        assert found.gradient.tolist() == self.near(expected.gradient.tolist())
        assert found.metrics == self.near(expected.metrics)

    def near(self, expected: Any) -> Any:
        """What equals `expected` up to rounding."""
        return pytest.approx(expected, rel=self.tolerance, abs=self.tolerance)


class PolicyLossContract(LossContract):
    """Subclass it and set `algorithm`, or write `loss`. A loss of a policy keeps these promises, too."""

    algorithm: Algorithm
    """The algorithm whose loss of the policy is under test. Not needed where `loss` is written."""
    closed_form: ClosedForm | None = None
    """What the loss is to equal, where the engine agrees with the weights at the start of the step, and the reference
    with those that are trained. None: only the signs of its gradient at ratio 1 are tested.
    """

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of `algorithm`."""
        return self.algorithm.policy_task()[1].loss(inputs)

    def columns(self) -> Iterable[str]:
        """The algorithm's own columns of numbers that its training task reads."""
        if not hasattr(self, "algorithm"):
            return ()
        read = self.algorithm.policy_task()[0].reads
        return [name for name, kind in self.algorithm.columns.items() if kind == ColumnKind.FLOATS and name in read]

    def test_on_the_policy_the_ratio_is_exactly_1(self) -> None:
        """No rounding makes a ratio of what is equal, and nothing is clipped or rejected."""
        samples = on_policy(self.batch(seed=0))
        found = compute(self.loss, samples)
        assert found.metrics["tokens"] == pack(samples).mask_N.sum()
        assert found.metrics.get("ratio", found.metrics["tokens"]) == found.metrics["tokens"]
        assert not any(value for name, value in found.metrics.items() if name.startswith("clip_fraction"))

    @pytest.mark.parametrize("seed", range(3))
    def test_on_the_policy_the_gradient_is_that_of_the_policy(self, seed: int) -> None:
        """At ratio 1 the gradient is that of -A log p: the sign of -A, and with a closed form its aggregation, too."""
        samples = on_policy(self.batch(seed))
        found = compute(self.loss, samples)
        inputs = pack(samples)
        assert (found.gradient * inputs.advantages_N <= 0)[inputs.mask_N > 0].all(), "it trains against the advantage"
        assert found.gradient.any()
        if self.closed_form is not None:
            at_ratio_1 = ClosedForm(mode=self.closed_form.mode, norm_tokens=self.closed_form.norm_tokens)
            slopes = [slope for sample in samples for slope in at_ratio_1.values(sample)[1]]
            assert found.gradient.tolist() == self.near(slopes)
            assert found.denominator == at_ratio_1.denominator(samples)

    @pytest.mark.parametrize("seed", range(3))
    def test_loss_and_gradient_equal_the_closed_form(self, seed: int) -> None:
        """Off the policy, each token has the loss and the slope that its formula gives."""
        if self.closed_form is None or self.closed_form.surrogate is None:
            pytest.skip("no closed form of the surrogate is given")
        samples = [
            {**sample, "rollout_log_probs": sample["old_log_probs"], "ref_log_probs": sample["log_probs"]}
            for sample in self.batch(seed)
        ]
        found = compute(self.loss, samples)
        values = [self.closed_form.values(sample) for sample in samples]
        losses, slopes = ([number for value in values for number in value[kind]] for kind in (0, 1))
        assert found.loss_sum == self.near(math.fsum(losses))
        assert found.gradient.tolist() == self.near(slopes)
        assert found.denominator == self.closed_form.denominator(samples)
