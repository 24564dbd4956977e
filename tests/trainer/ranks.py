"""A trainer of two data-parallel ranks behind one object, as the contract asks. Both are in this process."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tailrace.algorithms.loss_inputs import add_metrics
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import Loss, TrainerArgs, TrainSample, UpdateResult
from tailrace.types import FloatArray


class TwoRanks(SingleTrainer):
    """A trainer that is rank 0 and holds rank 1. Each rank has all weights and every other group."""

    def __init__(self, args: TrainerArgs) -> None:
        super().__init__(args)
        self._other = SingleTrainer(args)

    def log_probs(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        parts = super().log_probs(samples[::2]), self._other.log_probs(samples[1::2])
        return [parts[number % 2][number // 2] for number in range(len(samples))]

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        super().accumulate([sample for sample in samples if sample.group_id % 2 == 0], loss)
        self._other.accumulate([sample for sample in samples if sample.group_id % 2], loss)

    def apply(self) -> UpdateResult:
        """Sum the gradients of the ranks, and step by the sum."""
        for mine, theirs in zip(self._model.parameters(), self._other._model.parameters(), strict=True):
            if theirs.grad is not None:
                mine.grad = theirs.grad.clone() if mine.grad is None else mine.grad + theirs.grad
        ours, others = self._sums, self._other._sums
        ours.losses += others.losses
        ours.groups += others.groups
        ours.denominator += others.denominator
        add_metrics(ours.metrics, others.metrics)
        self._other.discard()
        result = super().apply()
        self._share()
        return result

    def discard(self) -> None:
        super().discard()
        self._other.discard()

    def load(self, directory: Path) -> None:
        super().load(directory)
        self._share()

    @torch.no_grad()
    def _share(self) -> None:
        for mine, theirs in zip(self._model.parameters(), self._other._model.parameters(), strict=True):
            theirs.copy_(mine)
