"""Typed inputs and outputs of losses, and the shape of an algorithm.

Losses work on packed response tokens: N tokens of S samples, without padding. They return sums; the trainer divides
the accumulated gradient once by the accumulated denominator, so a batch gives the same update however it is cut.

An algorithm is made, and its advantages computed, without PyTorch: a process that does no more starts sooner.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.types import TaskSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Packed response tokens of S samples."""

    log_probs_N: "torch.Tensor"
    """Of the weights being trained; carries the gradient."""
    old_log_probs_N: "torch.Tensor"
    """Of the weights at the start of the step."""
    advantages_N: "torch.Tensor"
    mask_N: "torch.Tensor"
    """`response_mask`, float: 1 on tokens that are trained on."""
    sample_N: "torch.Tensor"
    """int64, the sample in 0 … S - 1 of each token."""
    samples: int
    """S"""
    ref_log_probs_N: "torch.Tensor | None" = None
    rollout_log_probs_N: "torch.Tensor | None" = None
    """Of the engine while sampling."""
    on_policy_N: "torch.Tensor | None" = None
    """1 on tokens of responses that the weights at the start of the step made, all of them; 0 on others. None where
    that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss as a sum with its denominator."""

    loss_sum: "torch.Tensor"
    """Scalar; loss = loss_sum / denominator over the whole batch."""
    denominator: float
    metrics: dict[str, float]
    """Sums over masked tokens, each to be divided by `metrics["tokens"]` of the whole batch."""


class Algorithm(ABC):
    """A table of tasks and the pure functions that fill it."""

    @property
    @abstractmethod
    def tasks(self) -> tuple[TaskSpec, ...]:
        """The table: who reads and writes which columns."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Samples of a prompt."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the loss reads `ref_log_probs`."""

    @abstractmethod
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One advantage for each sample of one group. A NaN reward (grading failed) takes no part and gets 0."""

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutput:
        """The policy loss of a micro-batch."""
