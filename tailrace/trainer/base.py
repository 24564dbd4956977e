"""The trainer's interface. Synchronous: the pipeline runs it in the executor of its device.

One object stands for all ranks of a trainer, be they one or many. Its callers know nothing of ranks: each call is for
all of them, and what it returns is of the whole batch, whichever rank has computed a part. Decision 021 says who
claims.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.config.run import RunConfig
from tailrace.config.trainer import TrainerConfig
from tailrace.trainer.export import export_model
from tailrace.types import FloatArray, IntArray

Loss = Callable[[LossInputs], LossOutput]
"""A pure function. It is called for each micro-batch, by the rank that has it, and may be pickled on its way there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArgs:
    """What every trainer is made from, and every scorer."""

    model_dir: Path
    """The initial checkpoint, a Hugging Face directory."""
    config: TrainerConfig
    """The section `trainer` of a recipe."""
    temperature: float
    """Of sampling; log-probabilities are taken at it. 0, greedy, counts as 1."""
    total_updates: int
    """Optimizer steps of the whole run, for the schedule of the learning rate."""
    device: str
    """A torch device."""

    @classmethod
    def of(cls, config: RunConfig, model_dir: Path) -> Self:
        """Those of a run."""
        return cls(
            model_dir=model_dir,
            config=config.trainer,
            temperature=config.sampling.temperature,
            total_updates=config.trainer.steps * config.mini_batches_per_step,
            device=config.device,
        )


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
    """Of the whole gradient, before clipping."""
    lr: float
    metrics: dict[str, float]
    """Means over the trained tokens of the loss's metrics, and their number, `tokens`."""


class Trainer(ABC):
    """Owns the master weights and the optimizer, on one rank or cut over several.

    It is made once and called in one process, one call at a time. How its ranks are started, and how they exchange
    tensors, is its own affair.
    """

    model_dir: Path
    """The initial checkpoint, a Hugging Face directory."""

    @abstractmethod
    def log_probs(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """[R] log-probabilities of each sample's response tokens, without gradients, at the sampling temperature.

        They come in the order of `samples`, and do not depend on which rank computes which.
        """

    @abstractmethod
    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        """Pack `samples` into micro-batches in the order given; add each one's gradient of its loss sum.

        `samples` are those of all ranks, which share them as the trainer likes. Gradients, loss sums, denominators and
        metrics are sums over samples, so the update is that of the whole batch however it is shared, but for rounding.
        """

    @abstractmethod
    def apply(self) -> UpdateResult:
        """Divide by the accumulated denominator, clip, step the optimizer and the schedule, and zero the gradients.

        There is one denominator, and one norm to clip by: those of the whole batch, on every rank. All ranks step, or
        none does: a loss or gradient that is not finite on one of them is so on all. A skipped step changes no weight,
        but the schedule goes on.

        Raises:
            NonFiniteError: too many optimizer steps in a row were skipped for a non-finite loss or gradient.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget what was accumulated since the last `apply`, on every rank."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The master weights under their HF names; tied weights once. Not copies: read them before the next `apply`.

        Each is the full tensor, in this process. One that is cut over ranks is put together when its turn comes, so
        that no more than that one is held in full.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule and random states into an existing empty directory.

        It is called once for all ranks. What any of them writes is there when it returns.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, bit for bit, on every rank.

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
