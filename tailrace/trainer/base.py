"""The trainer's interface. Synchronous: the pipeline runs it in the executor of its device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.trainer.export import export_model
from tailrace.types import FloatArray, IntArray

Loss = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """One sample to train on. Samples with equal `group_id` have equal `prompt_ids`."""

    group_id: int
    prompt_ids: IntArray
    """[P]"""
    response_ids: IntArray
    """[R]"""
    response_mask: IntArray
    """[R]"""
    columns: Mapping[str, FloatArray]
    """[R] each: what the loss reads for each token of the response, by column, such as `advantages`; all samples of a
    micro-batch have the same ones."""
    old_log_probs: FloatArray | None = None
    """[R]; None says that the weights have not changed since the step began, so they equal the current ones."""
    on_policy: bool | None = None
    """Whether the weights at the start of the step made all of the response; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one optimizer step did."""

    applied: bool
    """False: the step was skipped, for a loss or gradient that is not finite or for want of any trained token."""
    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    metrics: dict[str, float]
    """Means over the trained tokens of the loss's metrics, and their number, `tokens`."""


class Trainer(ABC):
    """Owns the master weights and the optimizer."""

    model_dir: Path
    """The initial checkpoint, a Hugging Face directory."""

    @abstractmethod
    def log_probs(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """[R] log-probabilities of each sample's response tokens, without gradients, at the sampling temperature."""

    @abstractmethod
    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        """Pack `samples` into micro-batches in the order given; add each one's gradient of its loss sum."""

    @abstractmethod
    def apply(self) -> UpdateResult:
        """Divide by the accumulated denominator, clip, step the optimizer and the schedule, and zero the gradients.

        A skipped step changes no weight, but the schedule goes on.

        Raises:
            NonFiniteError: too many optimizer steps in a row were skipped for a non-finite loss or gradient.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget what was accumulated since the last `apply`."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The master weights under their HF names; tied weights once. Not copies: read them before the next `apply`."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule and random states into an existing empty directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, bit for bit.

        Raises:
            CheckpointError: a file is missing or does not belong to this model.
        """

    def export(self, directory: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` loads; atomic.

        `dtype`: of the weights; None takes that of the initial checkpoint.

        Raises:
            CheckpointError: it cannot be written.
        """
        export_model(self.model_dir, directory, self.weights(), dtype)

    def evidence(self) -> dict[str, Any]:
        """JSON values that tell what the last skipped optimizer step saw; empty if none was skipped, or if nothing is
        known of it."""
        return {}
