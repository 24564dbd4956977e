"""Typed inputs and outputs of losses.

Losses work on packed response tokens: N tokens of S samples, without padding. They return sums. The trainer divides
the accumulated gradient once by the accumulated denominator, so every split of a batch gives the same update.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.host.ordered_sums import add_rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Packed response tokens of S samples."""

    log_probs_N: "torch.Tensor"
    """Log-probabilities under the weights being trained; carries the gradient."""
    old_log_probs_N: "torch.Tensor"
    """Log-probabilities under the weights at the start of the step."""
    mask_N: "torch.Tensor"
    """`response_mask`, float: 1 on tokens that are trained on."""
    sample_N: "torch.Tensor"
    """int64, the number of each token's sample, in 0 … S - 1."""
    samples: int
    """S"""
    columns_N: "Mapping[str, torch.Tensor]"
    """Float columns of the training task, by name: `advantages`, and every other column that the algorithm's tasks have
    written for each token.
    """
    on_policy_N: "torch.Tensor | None" = None
    """1 on tokens of responses that were made wholly by the weights at the start of the step; 0 on others. None where
    that is unknown.
    """

    @property
    def advantages_N(self) -> "torch.Tensor":
        """The column `advantages`."""
        return self.columns_N["advantages"]

    @property
    def ref_log_probs_N(self) -> "torch.Tensor | None":
        """The column `ref_log_probs`, computed by the frozen initial weights."""
        return self.columns_N.get("ref_log_probs")

    @property
    def rollout_log_probs_N(self) -> "torch.Tensor | None":
        """The column `rollout_log_probs`, from the engine while sampling."""
        return self.columns_N.get("rollout_log_probs")

    def sums_S(self, values_N: "torch.Tensor") -> "torch.Tensor":
        """[S] the sum of the values of each sample's tokens."""
        sums_S = values_N.new_zeros(self.samples)
        add_rows(sums_S, self.sample_N, values_N)
        return sums_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss as a sum with its denominator."""

    loss_sum: "torch.Tensor"
    """Scalar; loss = loss_sum / denominator over the whole batch."""
    denominator: float
    metrics: dict[str, float]
    """Sums over masked tokens, each to be divided by `metrics["tokens"]` of the whole batch. Those whose name ends with
    `_max` are maxima over tokens instead, 0 or more.
    """


def is_maximum(metric: str) -> bool:
    """Whether a metric of a loss is a maximum, by its name."""
    return metric.endswith("_max")


def add_metrics(totals: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add the metrics of one more part of a batch to the totals of the others."""
    for name, value in metrics.items():
        before = totals.get(name, 0.0)
        totals[name] = max(before, value) if is_maximum(name) else before + value
