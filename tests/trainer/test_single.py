import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.config.algorithm import GrpoConfig, KlConfig, LossAggMode
from tailrace.conformance.samples import load_plain, make_samples, plain_log_probs, with_log_probs
from tailrace.conformance.tiny import FAMILIES
from tailrace.errors import CheckpointError, ModelError, NonFiniteError
from tailrace.trainer import log_probs
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import Loss, TrainSample
from tests.conftest import TinyModel
from tests.trainer.largest import LargestTensor
from tests.trainer.single import make_scorer, make_trainer

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def grpo(mode: LossAggMode = "token-mean", kl: float = 0.0) -> Grpo:
    return Grpo(GrpoConfig(clip_high=0.28, loss_agg_mode=mode, kl=KlConfig(coefficient=kl)))


def plain_gradients(
    model_dir: Path, samples: Sequence[TrainSample], mode: LossAggMode, kl: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """The GRPO loss, written out over padded rows, and its gradients."""
    model = load_plain(model_dir)
    width = max(len(sample.response_ids) for sample in samples)

    def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(row.float(), (0, width - len(row))) for row in rows])

    log_probs = padded([plain_log_probs(model, sample) for sample in samples])
    mask = padded([torch.from_numpy(sample.response_mask) for sample in samples])
    advantages = padded([torch.from_numpy(sample.columns["advantages"]) for sample in samples])
    old, ref = log_probs.detach(), torch.zeros_like(log_probs)
    if samples[0].old_log_probs is not None:
        old = padded([torch.from_numpy(s.old_log_probs) for s in samples if s.old_log_probs is not None])
    if "ref_log_probs" in samples[0].columns:
        ref = padded([torch.from_numpy(sample.columns["ref_log_probs"]) for sample in samples])
    ratio = (log_probs - old).exp()
    token_loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    token_loss = (token_loss + kl * ((ref - log_probs).exp() - (ref - log_probs) - 1)) * mask
    rows = mask.sum(1) > 0
    loss = {
        "token-mean": token_loss.sum() / mask.sum(),
        "seq-mean-token-mean": (token_loss[rows].sum(1) / mask[rows].sum(1)).mean(),
        "seq-mean-token-sum": token_loss[rows].sum(1).mean(),
    }[mode]
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients(trainer: SingleTrainer, denominator: float) -> dict[str, torch.Tensor]:
    return {n: p.grad / denominator for n, p in trainer._model.named_parameters() if p.grad is not None}


def recording(loss: Loss, denominators: list[float]) -> Loss:
    def recorded(inputs: LossInputs) -> LossOutput:
        output = loss(inputs)
        denominators.append(output.denominator)
        return output

    return recorded


def weights(trainer: SingleTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1, 24, 4096])
def test_packed_log_probs_equal_those_of_each_sequence_alone(tiny_model: TinyModel, family: str, budget: int) -> None:
    samples = make_samples()
    trainer = make_trainer(tiny_model(family), temperature=0.7, micro_batch_tokens=budget)
    model = load_plain(tiny_model(family))
    for sample, values in zip(samples, trainer.log_probs(samples), strict=True):
        expected = plain_log_probs(model, sample, 0.7).detach().numpy()
        np.testing.assert_allclose(values, expected, atol=2e-5)
        assert values.dtype == np.float32


def some_equal() -> list[TrainSample]:
    """Samples of two groups, where responses are equal and all else is not."""
    first, second, third, fourth, fifth = make_samples(groups=((5, (4, 4, 4)), (3, (2, 2))))
    third = replace(third, response_ids=first.response_ids)
    return [first, second, third, fourth, replace(fifth, response_ids=fourth.response_ids)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("make", [make_samples, some_equal])
def test_packed_gradients_equal_the_padded_loss_of_each_sequence_alone(
    tiny_model: TinyModel, family: str, mode: LossAggMode, budget: int, make: Callable[[], list[TrainSample]]
) -> None:
    samples = with_log_probs(make())
    loss, expected = plain_gradients(tiny_model(family), samples, mode, kl=0.1)
    trainer = make_trainer(tiny_model(family), micro_batch_tokens=budget)
    denominators: list[float] = []
    trainer.accumulate(samples, recording(grpo(mode, 0.1).loss, denominators))
    found = gradients(trainer, sum(denominators))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=2e-4)
    result = trainer.apply()
    assert result.loss == pytest.approx(loss, rel=1e-4)
    total = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert result.grad_norm == pytest.approx(total, rel=1e-4)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_on_policy(tiny_model: TinyModel) -> None:
    samples = make_samples()
    _, expected = plain_gradients(tiny_model("llama"), samples, "token-mean", kl=0.0)
    trainer = make_trainer(tiny_model("llama"))
    denominators: list[float] = []
    trainer.accumulate(samples, recording(grpo().loss, denominators))
    for name, gradient in gradients(trainer, sum(denominators)).items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=2e-4)
    assert trainer.apply().metrics["ratio"] == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(tiny_model: TinyModel, family: str) -> None:
    plain, checkpointed = (make_trainer(tiny_model(family), gradient_checkpointing=flag) for flag in (False, True))
    for trainer in (plain, checkpointed):
        trainer.accumulate(make_samples(), grpo().loss)
        trainer.apply()
    assert_equal(weights(plain), weights(checkpointed))


def test_equal_cuts_over_several_calls_give_the_same_bits(tiny_model: TinyModel) -> None:
    samples = make_samples()
    whole, streamed = (make_trainer(tiny_model("llama"), micro_batch_tokens=24) for _ in range(2))
    whole.accumulate(samples, grpo().loss)
    streamed.accumulate(samples[:5], grpo().loss)  # 16 + 9 tokens fill two micro-batches; the next group starts one
    streamed.accumulate(samples[5:], grpo().loss)
    assert whole.apply() == streamed.apply()
    assert_equal(weights(whole), weights(streamed))


def test_nothing_of_tokens_times_tokens_or_tokens_times_vocabulary_is_made(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "MAX_BLOCK_ELEMENTS", 2**14)
    samples = make_samples(groups=((100, (60,) * 6), (60, (40,) * 2)))
    trainer = make_trainer(tiny_model("llama"))
    tokens = 100 + 6 * 60 + 60 + 2 * 40
    with LargestTensor() as largest:
        trainer.accumulate(samples, grpo().loss)
    assert largest.elements <= tokens * 96  # the activations of the feed-forward layer
    assert largest.elements < min(440 * 261, tokens * tokens) / 1.5


def test_a_sample_without_response_tokens_is_left_out(tiny_model: TinyModel) -> None:
    samples = make_samples()
    empty = replace(
        samples[1],
        response_ids=np.zeros(0, np.int64),
        response_mask=np.zeros(0, np.int64),
        columns={"advantages": np.zeros(0, np.float32)},
    )
    trainer = make_trainer(tiny_model("llama"))
    values = trainer.log_probs([samples[0], empty, samples[2]])
    assert [len(row) for row in values] == [len(samples[0].response_ids), 0, len(samples[2].response_ids)]
    alone = trainer.log_probs([samples[0], samples[2]])
    np.testing.assert_array_equal(np.concatenate(values), np.concatenate(alone))


def test_a_bf16_reference_of_a_bf16_checkpoint_equals_the_untrained_policy(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    make_trainer(tiny_model("qwen2")).export(tmp_path / "bf16", dtype=torch.bfloat16)
    samples = make_samples()
    policy = make_trainer(tmp_path / "bf16", precision="bf16").log_probs(samples)
    reference = make_scorer(tmp_path / "bf16", precision="bf16").log_probs(samples)
    np.testing.assert_array_equal(np.concatenate(policy), np.concatenate(reference))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_scorer_says_what_a_trainer_of_the_same_weights_does_and_keeps_nothing_beside_them(
    tiny_model: TinyModel, temperature: float
) -> None:
    samples, trainer = make_samples(), make_trainer(tiny_model("llama"), temperature=temperature)
    scorer = make_scorer(tiny_model("llama"), temperature=temperature)
    expected = trainer.log_probs(samples)
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate(scorer.log_probs(samples)), np.concatenate(expected))
        trainer.accumulate(samples, Grpo(GrpoConfig()).loss)
        assert trainer.apply().applied
    assert not any(parameter.requires_grad for parameter in scorer._model.parameters())
    assert not hasattr(scorer, "_optimizer")


def test_a_frozen_model_takes_the_bytes_that_training_computes_in(tiny_model: TinyModel) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for precision, dtype in dtypes.items():
        scorer = make_scorer(tiny_model("llama"), precision=precision)
        assert {parameter.dtype for parameter in scorer._model.parameters()} == {dtype}


def test_bf16_log_probs_are_near_those_of_fp32(tiny_model: TinyModel) -> None:
    samples = make_samples()
    exact, rounded = (make_trainer(tiny_model("llama"), precision=p).log_probs(samples) for p in ("fp32", "bf16"))
    difference = np.abs(np.concatenate(exact) - np.concatenate(rounded))
    assert 0 < difference.max() < 0.1


def test_apply_equals_torch_adamw_with_clipping_and_decay_on_matrices_only(tiny_model: TinyModel) -> None:
    samples = with_log_probs(make_samples())
    trainer = make_trainer(tiny_model("qwen2"), max_grad_norm=0.05, weight_decay=0.1, lr=1e-2)
    _, expected = plain_gradients(tiny_model("qwen2"), samples, "token-mean", kl=0.0)
    model = load_plain(tiny_model("qwen2"))
    for name, parameter in model.named_parameters():
        parameter.grad = expected[name]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-8, foreach=False)
    optimizer.step()
    trainer.accumulate(samples, grpo().loss)
    assert trainer.apply().grad_norm > 0.05
    for name, tensor in trainer.weights():
        large = expected[name].abs() > 1e-6  # elsewhere rounding decides the sign of the first step
        torch.testing.assert_close(tensor[large], model.get_parameter(name).detach()[large], atol=1e-4, rtol=1e-4)


def test_the_learning_rate_follows_the_schedule(tiny_model: TinyModel) -> None:
    trainer = make_trainer(tiny_model("llama"), schedule="linear", warmup_steps=2, lr=1e-3)
    rates = []
    for _ in range(10):
        trainer.accumulate(make_samples(groups=((2, (2,)), (2, (2,)))), grpo().loss)
        rates.append(trainer.apply().lr)
    assert rates == pytest.approx([1e-3 * f for f in (0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8)])


def not_finite(inputs: LossInputs) -> LossOutput:
    output = grpo().loss(inputs)
    return replace(output, loss_sum=output.loss_sum * float("nan"))


def test_infinite_losses_of_both_signs_are_not_finite(tiny_model: TinyModel) -> None:
    trainer = make_trainer(tiny_model("llama"))
    for sign in (1.0, -1.0):
        shift = sign * math.inf
        trainer.accumulate(make_samples(), lambda i, s=shift: replace(o := grpo().loss(i), loss_sum=o.loss_sum + s))  # type: ignore[misc]
    assert not trainer.apply().applied


def test_three_non_finite_steps_in_a_row_stop_the_run_with_evidence(tiny_model: TinyModel) -> None:
    trainer = make_trainer(tiny_model("llama"))
    assert trainer.evidence() == {}
    for _ in range(2):
        trainer.accumulate(make_samples(), not_finite)
        assert not trainer.apply().applied
    samples = make_samples()
    trainer.accumulate(samples[:5], lambda inputs: replace(grpo().loss(inputs), loss_sum=inputs.log_probs_N.sum() * 0))
    trainer.accumulate(samples[5:], not_finite)
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row"):
        trainer.apply()
    evidence = json.loads(json.dumps(trainer.evidence()))
    assert evidence["update"] == 2
    assert (evidence["loss"], evidence["gradient_norm"]) == ("nan", "nan")
    assert evidence["micro_batches"] == [{"groups": [0, 1], "loss_sum": 0.0}, {"groups": [2], "loss_sum": "nan"}]
    assert evidence["gradient_norms"].keys() == dict(trainer.weights()).keys()


@pytest.mark.parametrize(("saved", "loading"), [("qwen3", "llama"), ("llama", "qwen2"), ("qwen2", "llama")])
def test_a_checkpoint_of_another_model_is_refused_and_nothing_restored(
    tiny_model: TinyModel, tmp_path: Path, saved: str, loading: str
) -> None:
    make_trainer(tiny_model(saved)).save(tmp_path)
    trainer = make_trainer(tiny_model(loading))
    before = weights(trainer)
    with pytest.raises(CheckpointError, match="another model"):
        trainer.load(tmp_path)
    assert_equal(weights(trainer), before)


def test_loading_a_model_draws_no_progress_bar(tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]) -> None:
    model_dir = tiny_model("llama")
    capfd.readouterr()
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    make_trainer(model_dir)
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "random.safetensors", "trainer.json"])
def test_a_missing_file_is_named(tiny_model: TinyModel, tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tiny_model("llama"))
    trainer.save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        trainer.load(tmp_path)


def test_an_export_takes_the_dtype_asked_for_or_that_of_the_initial_checkpoint(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    make_trainer(tiny_model("llama")).export(tmp_path / "asked", dtype=torch.bfloat16)
    make_trainer(tmp_path / "asked").export(tmp_path / "kept")
    for path in (tmp_path / "asked", tmp_path / "kept"):
        model = AutoModelForCausalLM.from_pretrained(path)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_model_that_lacks_a_weight_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    make_trainer(tiny_model("llama")).export(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights .* such as model\.norm\.weight"):
        make_trainer(tmp_path / "model")


def test_sliding_window_layers_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    make_trainer(tiny_model("qwen3")).export(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="use_sliding_window True"):
        make_trainer(tmp_path / "model")


def test_the_time_of_an_update_is_told_by_part_and_once(tiny_model: TinyModel) -> None:
    trainer = make_trainer(tiny_model("llama"))
    trainer.accumulate(make_samples(), grpo().loss)
    assert trainer.take_seconds().keys() == {"data", "forward", "backward"}
    trainer.apply()
    assert trainer.take_seconds().keys() == {"optimizer"}
    trainer.log_probs(make_samples())
    assert trainer.take_seconds().keys() == {"data", "forward"}
    assert trainer.take_seconds() == {}


def test_the_memory_of_a_trainer_is_that_of_its_parameters_gradients_and_moments(tiny_model: TinyModel) -> None:
    trainer = make_trainer(tiny_model("llama"))
    sizes = [tensor.numel() for _, tensor in trainer.weights()]
    weights, moments = 4 * sum(sizes), 2 * 4 * sum(sizes) + 4 * len(sizes)
    assert trainer.memory() == {"weights": weights, "gradients": 0, "optimizer": 0}
    trainer.accumulate(make_samples(), grpo().loss)
    assert trainer.memory() == {"weights": weights, "gradients": weights, "optimizer": 0}
    trainer.apply()
    assert trainer.memory() == {"weights": weights, "gradients": weights, "optimizer": moments}, "the most since then"
    assert trainer.memory() == {"weights": weights, "gradients": 0, "optimizer": moments}
    assert make_scorer(tiny_model("llama"), precision="bf16").memory() == {"weights": weights // 2}
