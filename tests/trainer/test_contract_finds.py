"""The trainer's contract finds trainers that break it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.config.trainer import AdapterTrainerBackend
from tailrace.conformance.trainer import TrainerContract
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import Loss, TrainerArgs, TrainSample, UpdateResult
from tailrace.types import FloatArray
from tests.conftest import TinyModel


class Averaging(SingleTrainer):
    """A trainer that divides each part of a batch by the part's own denominator."""

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        def averaged(inputs: LossInputs) -> LossOutput:
            output = loss(inputs)
            return replace(output, loss_sum=output.loss_sum / max(output.denominator, 1.0), denominator=1.0)

        super().accumulate(samples, averaged)


class Hot(SingleTrainer):
    """A trainer that ignores the temperature."""

    def __init__(self, args: TrainerArgs) -> None:
        super().__init__(replace(args, temperature=1.0))


class Remembering(SingleTrainer):
    """A trainer whose `discard` discards nothing."""

    def discard(self) -> None:
        return


class Careless(SingleTrainer):
    """A trainer that steps although the loss is not finite."""

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        def finite(inputs: LossInputs) -> LossOutput:
            output = loss(inputs)
            return replace(output, loss_sum=output.loss_sum.nan_to_num())

        super().accumulate(samples, finite)


class Hasty(SingleTrainer):
    """A trainer that steps while it accumulates."""

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        super().accumulate(samples, loss)
        super().apply()

    def apply(self) -> UpdateResult:
        return UpdateResult(applied=True, loss=0.0, grad_norm=0.0, lr=0.0, metrics={})


class Prefixed(SingleTrainer):
    """A trainer that prefixes weight names as a wrapper of modules does."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"module.{name}", tensor) for name, tensor in super().weights())


class Forgetful(SingleTrainer):
    """A trainer that restores the weights, but not the optimizer's moments."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self._optimizer.state.clear()


class Shifted(SingleTrainer):
    """A trainer that gives log-probabilities to the wrong tokens."""

    def log_probs(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        return [values[::-1].copy() for values in super().log_probs(samples)]


Check = Callable[[TrainerContract, Path, Path], None]
CASES: dict[type[SingleTrainer], Check] = {
    Averaging: lambda c, model, _: c.test_however_a_batch_is_cut_the_update_is_equal(model, "token-mean"),
    Hot: lambda c, model, _: c.test_log_probs_are_those_of_each_sequence_alone_at_the_temperature(model, 0.7),
    Remembering: lambda c, model, _: c.test_discard_forgets_what_was_accumulated(model),
    Careless: lambda c, model, _: c.test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(model),
    Hasty: lambda c, model, _: c.test_only_apply_changes_the_weights(model),
    Prefixed: lambda c, model, _: c.test_weights_have_their_hugging_face_names_and_come_once(model),
    Forgetful: lambda c, model, path: c.test_a_restored_trainer_goes_on_bit_for_bit(model, path),
    Shifted: lambda c, model, _: c.test_log_probs_are_those_of_each_sequence_alone_at_the_temperature(model, 1.0),
}


@pytest.mark.parametrize("trainer", CASES, ids=lambda trainer: trainer.__name__)
def test_a_trainer_that_breaks_the_contract_is_found(
    trainer: type[SingleTrainer], tiny_model: TinyModel, tmp_path: Path
) -> None:
    class Contract(TrainerContract):
        backend = AdapterTrainerBackend(path=f"{__name__}.{trainer.__name__}")

    with pytest.raises(AssertionError):
        CASES[trainer](Contract(), tiny_model("llama"), tmp_path)
