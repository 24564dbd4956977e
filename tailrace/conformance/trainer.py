"""The contract of every trainer, as tests."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.config.algorithm import GrpoConfig, KlConfig, LossAggMode
from tailrace.config.trainer import TrainerBackend, TrainerConfig
from tailrace.conformance.samples import load_plain, make_samples, plain_log_probs, with_log_probs
from tailrace.conformance.tiny import write_tiny_model
from tailrace.errors import CheckpointError, NonFiniteError
from tailrace.registers.phases import PARTS, PURPOSES
from tailrace.trainer.base import Trainer, TrainerArgs, TrainSample, UpdateResult
from tailrace.trainer.factory import make_trainer

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
Weights = dict[str, torch.Tensor]


class TrainerContract:
    """Subclass it and set `backend`. Every test is a promise of `tailrace.trainer.base.Trainer`.

    The trainer trains in fp32 (`trainer.precision`).
    """

    backend: ClassVar[TrainerBackend]
    """The section `trainer.backend` of the trainer under test, as in a recipe."""
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4
    """The allowed difference from transformers in fp32: of a log-probability; relative, of a loss and a norm."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The directory of the trained model: a tiny random Llama, unless a subclass overrides this fixture."""
        return write_tiny_model("llama", tmp_path_factory.mktemp("tiny"))

    def make(self, model_dir: Path, *, temperature: float = 1.0, **config: Any) -> Trainer:
        """Make a new trainer under test. `eps` is large, so that rounding turns no update around."""
        settings = {"backend": self.backend, "precision": "fp32", "lr": 1e-2, "eps": 1e-2, **config}
        args = TrainerArgs(
            model_dir=model_dir,
            config=TrainerConfig.model_validate(settings),
            temperature=temperature,
            total_updates=10,
            device=self.device,
        )
        return make_trainer(args)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_are_those_of_each_sequence_alone_at_the_temperature(
        self, model_dir: Path, temperature: float
    ) -> None:
        """`log_probs` equals transformers' forward pass of each sequence."""
        samples = make_samples()
        found = self.make(model_dir, temperature=temperature).log_probs(samples)
        model = load_plain(model_dir)
        for sample, values in zip(samples, found, strict=True):
            assert values.dtype == np.float32
            expected = plain_log_probs(model, sample, temperature).detach().numpy()
            np.testing.assert_allclose(values, expected, atol=self.tolerance)

    def test_a_sample_without_response_tokens_has_no_log_probs(self, model_dir: Path) -> None:
        """`log_probs` gives an empty array for an empty response."""
        samples = make_samples()
        found = self.make(model_dir).log_probs([samples[0], empty(samples[1]), samples[2]])
        assert [len(values) for values in found] == [len(samples[0].response_ids), 0, len(samples[2].response_ids)]

    @pytest.mark.parametrize("mode", MODES)
    def test_loss_and_gradient_norm_are_those_of_each_sequence_alone(self, model_dir: Path, mode: LossAggMode) -> None:
        """`accumulate` and `apply` equal one pass for each sample."""
        samples = with_log_probs(make_samples())
        loss, norm = plain_update(load_plain(model_dir), samples, grpo(mode, 0.1))
        result = train(self.make(model_dir), samples, grpo(mode, 0.1))
        assert result.applied
        assert result.loss == pytest.approx(loss, rel=self.tolerance)
        assert result.grad_norm == pytest.approx(norm, rel=10 * self.tolerance)

    def test_without_old_log_probs_the_ratio_is_one(self, model_dir: Path) -> None:
        """Samples without `old_log_probs` are trained on as on-policy."""
        samples = make_samples()
        result = train(self.make(model_dir), samples, grpo())
        assert result.metrics["ratio"] == pytest.approx(1.0, abs=self.tolerance)
        assert result.metrics["tokens"] == sum(int(sample.response_mask.sum()) for sample in samples)

    @pytest.mark.parametrize("mode", MODES)
    def test_however_a_batch_is_cut_the_update_is_equal(self, model_dir: Path, mode: LossAggMode) -> None:
        """Several calls of `accumulate` equal one with all samples."""
        samples = with_log_probs(make_samples())
        whole, streamed = self.make(model_dir), self.make(model_dir)
        expected = train(whole, samples, grpo(mode, 0.1))
        for part in (samples[:3], samples[3:5], samples[5:]):
            streamed.accumulate(part, grpo(mode, 0.1).loss)
        result = streamed.apply()
        assert (result.loss, result.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=self.tolerance)
        assert result.metrics == pytest.approx(expected.metrics, rel=self.tolerance, abs=self.tolerance)
        assert_near(weights(streamed), weights(whole), self.tolerance)

    def test_what_it_tells_of_time_and_memory_has_names_of_the_register(self, model_dir: Path) -> None:
        """`take_seconds` and `memory` use the names of `tailrace.registers.phases`, and no figure is negative."""
        trainer = self.make(model_dir)
        train(trainer, make_samples(), grpo())
        seconds, memory = trainer.take_seconds(), trainer.memory()
        assert seconds.keys() <= PARTS["update"].keys()
        assert memory.keys() <= PURPOSES.keys()
        assert all(figure >= 0 for figure in (*seconds.values(), *memory.values()))

    def test_log_probs_between_two_parts_of_a_batch_change_nothing(self, model_dir: Path) -> None:
        """`log_probs` leaves accumulated gradients as they are."""
        samples = make_samples()
        plain, asked = self.make(model_dir), self.make(model_dir)
        for trainer in (plain, asked):
            trainer.accumulate(samples[:5], grpo().loss)
            if trainer is asked:
                trainer.log_probs(samples)
            trainer.accumulate(samples[5:], grpo().loss)
        assert plain.apply() == asked.apply()
        assert_equal(weights(plain), weights(asked))

    def test_only_apply_changes_the_weights(self, model_dir: Path) -> None:
        """`accumulate` and `log_probs` change no weight."""
        trainer = self.make(model_dir)
        before = weights(trainer)
        trainer.accumulate(make_samples(), grpo().loss)
        trainer.log_probs(make_samples())
        assert_equal(weights(trainer), before)
        trainer.apply()
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())

    def test_discard_forgets_what_was_accumulated(self, model_dir: Path) -> None:
        """`discard` leaves no gradient and no sum."""
        clean, interrupted = self.make(model_dir), self.make(model_dir)
        interrupted.accumulate(make_samples(seed=5), grpo().loss)
        interrupted.discard()
        assert train(clean, make_samples(), grpo()) == train(interrupted, make_samples(), grpo())
        assert_equal(weights(clean), weights(interrupted))

    def test_nothing_of_an_update_is_left_for_the_next(self, model_dir: Path) -> None:
        """A second `apply` has nothing to apply."""
        trainer = self.make(model_dir)
        train(trainer, make_samples(), grpo())
        before = weights(trainer)
        assert not trainer.apply().applied
        assert_equal(weights(trainer), before)

    def test_an_update_without_any_trained_token_is_skipped_and_no_failure(self, model_dir: Path) -> None:
        """`apply` skips a batch whose masks are all 0."""
        trainer = self.make(model_dir, max_nonfinite_steps=1)
        before = weights(trainer)
        masked = make_samples()[-1]
        assert not train(trainer, [masked, empty(masked)], grpo()).applied
        assert_equal(weights(trainer), before)

    def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(self, model_dir: Path) -> None:
        """`apply` skips a loss or gradient that is not finite."""
        clean, troubled = self.make(model_dir), self.make(model_dir)
        before = weights(troubled)
        troubled.accumulate(make_samples(), grpo().loss)
        result = train(troubled, make_samples(), NotFinite(GrpoConfig()))
        assert not result.applied
        assert not math.isfinite(result.loss)
        assert_equal(weights(troubled), before)
        assert train(troubled, make_samples(), grpo()).applied
        train(clean, make_samples(), grpo())
        assert_equal(weights(troubled), weights(clean))

    def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run(self, model_dir: Path) -> None:
        """`apply` raises NonFiniteError after `max_nonfinite_steps`."""
        trainer = self.make(model_dir, max_nonfinite_steps=2)
        for algorithm in (NotFinite(GrpoConfig()), grpo(), NotFinite(GrpoConfig())):
            train(trainer, make_samples(), algorithm)
        with pytest.raises(NonFiniteError):
            train(trainer, make_samples(), NotFinite(GrpoConfig()))
        json.dumps(trainer.evidence(), allow_nan=False)

    def test_training_raises_the_probability_of_rewarded_responses(self, model_dir: Path) -> None:
        """The sign of an advantage is the direction of the update."""
        samples = [
            replace(sample, columns={"advantages": np.full(5, sign, np.float32)}, response_mask=np.ones(5, np.int64))
            for sample, sign in zip(make_samples(groups=((6, (5, 5)),)), (1.0, -1.0), strict=True)
        ]
        trainer = self.make(model_dir, eps=1e-8, lr=1e-3)
        history = []
        for _ in range(5):
            history.append([float(values.sum()) for values in trainer.log_probs(samples)])
            assert train(trainer, samples, grpo()).lr > 0
        assert all(later[0] > earlier[0] and later[1] < earlier[1] for earlier, later in pairwise(history))

    def test_weights_have_their_hugging_face_names_and_come_once(self, model_dir: Path) -> None:
        """`weights` yields each tensor once, as the checkpoint names it."""
        names = [name for name, _ in self.make(model_dir).weights()]
        expected = {name: parameter.detach() for name, parameter in load_plain(model_dir).named_parameters()}
        assert sorted(names) == sorted(expected)
        assert_equal(weights(self.make(model_dir)), expected)

    def test_a_restored_trainer_goes_on_bit_for_bit(self, model_dir: Path, tmp_path: Path) -> None:
        """`load` restores all that `save` wrote, the schedule included."""
        uninterrupted, resumed = (self.make(model_dir, schedule="cosine") for _ in range(2))
        for seed in (0, 1):
            train(uninterrupted, make_samples(seed=seed), grpo())
        uninterrupted.save(tmp_path)
        random = torch.rand(3), np.random.rand(3)
        expected = [train(uninterrupted, make_samples(seed=seed), grpo()) for seed in (2, 3)]
        resumed.accumulate(make_samples(seed=7), grpo().loss)
        resumed.load(tmp_path)
        assert torch.equal(torch.rand(3), random[0])
        assert np.array_equal(np.random.rand(3), random[1])
        assert [train(resumed, make_samples(seed=seed), grpo()) for seed in (2, 3)] == expected
        assert_equal(weights(resumed), weights(uninterrupted))

    def test_skipped_steps_in_a_row_survive_a_restart(self, model_dir: Path, tmp_path: Path) -> None:
        """`save` keeps the count of skipped steps."""
        first, second = (self.make(model_dir, max_nonfinite_steps=2) for _ in range(2))
        train(first, make_samples(), NotFinite(GrpoConfig()))
        first.save(tmp_path)
        second.load(tmp_path)
        with pytest.raises(NonFiniteError):
            train(second, make_samples(), NotFinite(GrpoConfig()))

    def test_what_is_no_checkpoint_is_refused_and_nothing_restored(self, model_dir: Path, tmp_path: Path) -> None:
        """`load` restores everything or raises CheckpointError."""
        trainer = self.make(model_dir)
        before = weights(trainer)
        with pytest.raises(CheckpointError):
            trainer.load(tmp_path)
        assert_equal(weights(trainer), before)

    def test_an_exported_model_loads_with_the_trained_weights(self, model_dir: Path, tmp_path: Path) -> None:
        """`export` writes what `from_pretrained` loads."""
        trainer = self.make(model_dir)
        train(trainer, make_samples(), grpo())
        trainer.export(tmp_path / "model")
        trainer.export(tmp_path / "model")  # replaces it
        exported = {name: parameter.detach() for name, parameter in load_plain(tmp_path / "model").named_parameters()}
        assert_equal(exported, weights(trainer))
        assert AutoTokenizer.from_pretrained(tmp_path / "model")("n1")["input_ids"]
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


class NotFinite(Grpo):
    """GRPO with a loss that is NaN."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of GRPO, and make it NaN."""
        output = super().loss(inputs)
        return replace(output, loss_sum=output.loss_sum * math.nan)


def grpo(mode: LossAggMode = "token-mean", kl: float = 0.0) -> Grpo:
    """Make GRPO with clip-higher."""
    return Grpo(GrpoConfig(clip_high=0.28, loss_agg_mode=mode, kl=KlConfig(coefficient=kl)))


def train(trainer: Trainer, samples: Sequence[TrainSample], algorithm: Grpo) -> UpdateResult:
    """Take one optimizer step."""
    trainer.accumulate(samples, algorithm.loss)
    return trainer.apply()


def plain_update(model: PreTrainedModel, samples: Sequence[TrainSample], algorithm: Grpo) -> tuple[float, float]:
    """Compute the loss of a batch and the norm of its gradient, one sample at a time."""
    outputs = []
    for sample in samples:
        log_probs = plain_log_probs(model, sample)
        assert sample.old_log_probs is not None
        inputs = LossInputs(
            log_probs_N=log_probs,
            old_log_probs_N=torch.from_numpy(sample.old_log_probs),
            mask_N=torch.from_numpy(sample.response_mask).float(),
            sample_N=torch.zeros(len(log_probs), dtype=torch.int64),
            samples=1,
            columns_N={name: torch.from_numpy(values) for name, values in sample.columns.items()},
        )
        outputs.append(algorithm.loss(inputs))
    loss = torch.stack([output.loss_sum for output in outputs]).sum() / sum(output.denominator for output in outputs)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), float(torch.nn.utils.get_total_norm(gradients))


def weights(trainer: Trainer) -> Weights:
    """Copy the trainer's weights to the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in trainer.weights()}


def empty(sample: TrainSample) -> TrainSample:
    """The same sample without a response."""
    return replace(
        sample,
        response_ids=np.zeros(0, np.int64),
        response_mask=np.zeros(0, np.int64),
        columns={name: np.zeros(0, np.float32) for name in sample.columns},
    )


def assert_equal(one: Weights, other: Weights) -> None:
    """Check that the weights are equal bit for bit."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_near(one: Weights, other: Weights, tolerance: float) -> None:
    """Check that the weights are equal up to rounding."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=tolerance)
