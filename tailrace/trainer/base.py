"""The trainer's interface. Its calls block: the pipeline runs them in the executor of the trainer's device.

One object stands for all ranks of a trainer, one or many. Its callers know nothing of ranks: each call is for all of
them, and returns the result of the whole batch, whichever rank has computed a part. Decision 021 says who claims rows.
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
"""A pure function. It is called for each micro-batch, by the rank that has it, and may be pickled to get there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArgs:
    """The arguments of every trainer and every scorer."""

    model_dir: Path
    """The initial checkpoint, a Hugging Face directory."""
    config: TrainerConfig
    """The section `trainer` of a recipe."""
    temperature: float
    """The sampling temperature, at which log-probabilities are taken. 0, greedy, counts as 1."""
    total_updates: int
    """Optimizer steps of the whole run, for the schedule of the learning rate."""
    frozen_updates: int = 0
    """Optimizer steps at the beginning whose learning rate is 0."""
    device: str
    """A torch device."""

    @classmethod
    def of(cls, config: RunConfig, model_dir: Path) -> Self:
        """The arguments for a run."""
        return cls(
            model_dir=model_dir,
            config=config.trainer,
            temperature=config.sampling.temperature,
            total_updates=config.trainer.steps * config.updates_per_step,
            frozen_updates=config.trainer.frozen_steps * config.updates_per_step,
            device=config.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """A sample to train on. Samples with equal `group_id` have equal `prompt_ids`."""

    group_id: int
    prompt_ids: IntArray
    """[P]"""
    response_ids: IntArray
    """[R]"""
    response_mask: IntArray
    """[R]"""
    columns: Mapping[str, FloatArray]
    """[R] each: the loss's inputs for each token of the response, by column, such as `advantages`. All samples of a
    micro-batch have the same columns.
    """
    old_log_probs: FloatArray | None = None
    """[R]; None: the weights have not changed since the step began, so they equal the current log-probabilities."""
    on_policy: bool | None = None
    """Whether the weights at the start of the step made all of the response; None where that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The result of one optimizer step."""

    applied: bool
    """False: the step was skipped, because a loss or gradient is not finite or because no token was trained on."""
    loss: float
    grad_norm: float
    """Norm of the whole gradient, before clipping."""
    lr: float
    metrics: dict[str, float]
    """The means of the loss's metrics over the trained tokens, and the number of these, `tokens`. Where that is 0, sums
    stand in the place of means. Maxima stay as they are (`tailrace.algorithms.loss_inputs.is_maximum`).
    """


class Trainer(ABC):
    """Owns the master weights and the optimizer, on one rank or sharded over several.

    It is made once and called in one process, one call at a time. It alone decides how its ranks are started and how
    they exchange tensors.
    """

    model_dir: Path
    """The initial checkpoint, a Hugging Face directory."""

    @abstractmethod
    def log_probs(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """Compute the log-probabilities of response tokens, without gradients, at the sampling temperature.

        Returns [R] for each sample, in the order of `samples`. They do not depend on which rank computes which.
        """

    @abstractmethod
    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        """Pack `samples` into micro-batches in the order given; add the gradient of each one's loss sum.

        `samples` are those of all ranks; the trainer shares them among its ranks as it likes. Gradients, loss sums,
        denominators and metrics are sums over samples, so every way to share gives the update of the whole batch,
        except for rounding.
        """

    @abstractmethod
    def apply(self) -> UpdateResult:
        """Divide by the accumulated denominator, clip, step the optimizer and the schedule, and zero the gradients.

        The denominator, and the norm to clip by, are those of the whole batch, on every rank. All ranks step, or none
        does: a loss or gradient that is not finite on one counts for all. A skipped step changes no weight, but the
        schedule goes on.

        Raises:
            NonFiniteError: too many optimizer steps in a row were skipped for a non-finite loss or gradient.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop the sums and gradients accumulated since the last `apply`, on every rank."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The master weights under their HF names; tied weights once. Not copies: read them before the next `apply`.

        Each is the full tensor, in this process. A tensor that is sharded over ranks is assembled when its turn comes,
        so that only one at a time is held in full.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule and random states into an existing empty directory.

        It is called once for all ranks. The files of all of them are there when it returns.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore the files that `save` wrote, bit for bit, on every rank.

        Raises:
            CheckpointError: a file is missing or does not belong to this model.
        """

    def export(self, directory: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` loads; atomic.

        `dtype`: of the weights; None takes the initial checkpoint's.

        Raises:
            CheckpointError: it cannot be written.
        """
        export_model(self.model_dir, directory, self.weights(), dtype)

    def take_seconds(self) -> Mapping[str, float]:
        """Return the seconds of the update since the last call, by `registers.phases.PARTS`, as far as measured.

        Callable from any thread. A trainer that measures nothing returns nothing.
        """
        return {}

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that the trainer holds on its device, by `registers.phases.PURPOSES`, as far as known.

        The figures of memory that comes and goes are the most since the last call. Callable from any thread.
        """
        return {}

    def evidence(self) -> dict[str, Any]:
        """JSON values about the last skipped optimizer step; empty if none was skipped or nothing is known of it."""
        return {}
