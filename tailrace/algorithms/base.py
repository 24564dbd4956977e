"""Typed inputs and outputs of losses, and the shape of an algorithm.

Losses work on packed response tokens: N tokens of S samples, without padding. They return sums; the trainer divides
the accumulated gradient once by the accumulated denominator, so a batch gives the same update however it is cut.

An algorithm is made, and its table read, without PyTorch: a process that does no more starts sooner.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.algorithms.table import TableTask, Train
from tailrace.config.columns import ColumnKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Packed response tokens of S samples."""

    log_probs_N: "torch.Tensor"
    """Of the weights being trained; carries the gradient."""
    old_log_probs_N: "torch.Tensor"
    """Of the weights at the start of the step."""
    mask_N: "torch.Tensor"
    """`response_mask`, float: 1 on tokens that are trained on."""
    sample_N: "torch.Tensor"
    """int64, the sample in 0 … S - 1 of each token."""
    samples: int
    """S"""
    columns_N: "Mapping[str, torch.Tensor]"
    """Float columns of the training task, by name: `advantages`, and whatever else the algorithm's tasks have written
    for each token."""
    on_policy_N: "torch.Tensor | None" = None
    """1 on tokens of responses that the weights at the start of the step made, all of them; 0 on others. None where
    that is not known."""

    @property
    def advantages_N(self) -> "torch.Tensor":
        """The column `advantages`."""
        return self.columns_N["advantages"]

    @property
    def ref_log_probs_N(self) -> "torch.Tensor | None":
        """The column `ref_log_probs`, of the frozen initial weights."""
        return self.columns_N.get("ref_log_probs")

    @property
    def rollout_log_probs_N(self) -> "torch.Tensor | None":
        """The column `rollout_log_probs`, of the engine while sampling."""
        return self.columns_N.get("rollout_log_probs")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss as a sum with its denominator."""

    loss_sum: "torch.Tensor"
    """Scalar; loss = loss_sum / denominator over the whole batch."""
    denominator: float
    metrics: dict[str, float]
    """Sums over masked tokens, each to be divided by `metrics["tokens"]` of the whole batch."""


class Algorithm(ABC):
    """A table of tasks."""

    @property
    @abstractmethod
    def tasks(self) -> tuple[TableTask, ...]:
        """The table: one task generates, one trains the policy, the others are between them or train other models."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Samples of a prompt."""

    @property
    def columns(self) -> Mapping[str, ColumnKind]:
        """Columns of its tasks beside `tailrace.config.columns.COLUMNS`, and what their cells hold."""
        return {}

    def pools(self) -> tuple[str, ...]:
        """The kinds of worker processes of its tasks, in the order of the table."""
        return tuple(dict.fromkeys(task.pool for task in self.tasks))

    def policy_task(self) -> tuple[TableTask, Train]:
        """The task that trains the policy, and its work."""
        ((task, work),) = ((task, work) for task, work in self.trained() if work.make_trainer is None)
        return task, work

    def other_models(self) -> tuple[tuple[TableTask, Train], ...]:
        """The tasks that train other models, and their work."""
        return tuple((task, work) for task, work in self.trained() if work.make_trainer is not None)

    def trained(self) -> Iterator[tuple[TableTask, Train]]:
        """The tasks that train, and their work."""
        return ((task, task.work) for task in self.tasks if isinstance(task.work, Train))
