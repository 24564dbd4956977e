"""The trainer of one process and one device.

samples ──plan──▶ micro-batches ──forward──▶ log-probabilities ──loss──▶ sums ──backward──▶ .grad += …
apply: .grad / denominator, clip, AdamW, schedule
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from tailrace.algorithms.base import LossInputs, LossOutput
from tailrace.config.trainer import TrainerConfig
from tailrace.errors import ModelError, NonFiniteError
from tailrace.models.loading import check_model, load_model
from tailrace.trainer import state
from tailrace.trainer.attention import PROMPT_SHARED, make_layout
from tailrace.trainer.base import Loss, Trainer, TrainSample, UpdateResult
from tailrace.trainer.log_probs import token_log_probs
from tailrace.trainer.optimizer import learning_rate, make_optimizer
from tailrace.trainer.packing import GroupPart, PackedBatch, pack, plan_micro_batches
from tailrace.types import FloatArray


@dataclass(slots=True)
class _Sums:
    """What was accumulated since the last optimizer step, beside the gradients."""

    losses: list[float] = field(default_factory=list)
    """The loss sum of each micro-batch."""
    groups: list[list[int]] = field(default_factory=list)
    """The groups in each micro-batch."""
    denominator: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, parts: Sequence[GroupPart], output: LossOutput) -> None:
        self.losses.append(output.loss_sum.item())
        self.groups.append([part.samples[0].group_id for part in parts])
        self.denominator += output.denominator
        for name, value in output.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Over the trained tokens."""
        tokens = self.metrics["tokens"]
        return {name: value / tokens for name, value in self.metrics.items() if name != "tokens"} | {"tokens": tokens}


class SingleTrainer(Trainer):
    """Master weights and optimizer in fp32 on one device; bf16 autocast on request.

    A subclass may train another model, or otherwise: see `load_model`, `score` and `make_optimizer`.
    """

    def __init__(
        self,
        model_dir: Path,
        config: TrainerConfig,
        *,
        temperature: float,
        total_updates: int,
        device: str,
        reference: bool,
    ) -> None:
        """Load the weights.

        Args:
            model_dir: a Hugging Face directory.
            config: of the trainer.
            temperature: of sampling; log-probabilities are taken at it. 0, greedy, counts as 1.
            total_updates: optimizer steps of the whole run, for the schedule.
            device: a torch device.
            reference: keep a frozen copy of the initial weights, which `log_probs(reference=True)` needs.

        Raises:
            ModelError: see `check_model`; or a weight is not a finite number.
        """
        self._config = config
        self.model_dir = model_dir
        self._device = torch.device(device)
        self._temperature = temperature or 1.0
        self._total_updates = total_updates
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._model = self.load_model(torch.float32).train()
        if config.gradient_checkpointing:
            # transformers 5.19, the newest that vLLM takes, has it under its old name
            enable = getattr(self._model, "activation_checkpointing_enable", None)
            (enable or self._model.gradient_checkpointing_enable)()
        self._reference = self.load_model(self._dtype).requires_grad_(False) if reference else None
        self._optimizer = self.make_optimizer(self._model)
        self._counters = state.Counters()
        self._sums = _Sums()
        self._evidence: dict[str, Any] = {}

    def load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The initial weights, on the device. A subclass may add parameters, such as a critic's head.

        Raises:
            ModelError: see `check_model`; or a weight is not a finite number.
        """
        check_model(self.model_dir)
        model = load_model(self.model_dir, dtype=dtype, attention=PROMPT_SHARED)
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise ModelError(f"{self.model_dir} has numbers in {name} that are not finite; fetch the model again")
        model.to(self._device)  # type: ignore[arg-type]
        return model

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Called once, by the constructor; an adapter may have another one here. Its state must be tensors.

        `apply` sets the learning rate of each of its parameter groups to that of the schedule.
        """
        return make_optimizer(model, self._config)

    def log_probs(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[FloatArray]:
        model = self._reference if reference else self._model
        if model is None:
            raise ValueError("this trainer keeps no reference weights; make it with reference=True")
        results = [np.zeros(0, np.float32)] * len(samples)
        with torch.no_grad():
            for parts in plan_micro_batches(samples, self._config.micro_batch_tokens):
                batch = pack(parts)
                values = self._log_probs(model, batch, self._embed(model, batch)).cpu().numpy()
                for index, row in zip(_indices(parts), np.split(values, _ends(parts)), strict=True):
                    results[index] = row
        return results

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        for parts in plan_micro_batches(samples, self._config.micro_batch_tokens):
            batch = pack(parts)
            embeddings = self._embed(self._model, batch).requires_grad_()
            output = loss(self._loss_inputs(batch, self._log_probs(self._model, batch, embeddings)))
            output.loss_sum.backward()  # type: ignore[no-untyped-call]
            self._add_embedding_gradient(batch, embeddings)
            self._sums.add(parts, output)

    def apply(self) -> UpdateResult:
        sums, self._sums = self._sums, _Sums()
        rate = learning_rate(self._config, self._counters.updates, self._total_updates)
        self._counters.updates += 1
        if not sums.denominator:
            return self._skipped(sums, 0.0, 0.0, rate)
        loss = sum(sums.losses) / sums.denominator
        norm = self._gradient_norm() / sums.denominator
        if not math.isfinite(loss) or not math.isfinite(norm):
            return self._refuse(sums, loss, norm, rate)
        self._step(min(1.0, self._config.max_grad_norm / max(norm, 1e-12)) / sums.denominator, rate)
        self._counters.skipped_in_a_row = 0
        return UpdateResult(applied=True, loss=loss, grad_norm=norm, lr=rate, metrics=sums.means())

    def discard(self) -> None:
        self._sums = _Sums()
        self._optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def save(self, directory: Path) -> None:
        state.save(directory, self._model, self._optimizer, self._counters)

    def load(self, directory: Path) -> None:
        self._counters = state.load(directory, self._model, self._optimizer)
        self.discard()

    def evidence(self) -> dict[str, Any]:
        return self._evidence

    def _embed(self, model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
        """[1, T, H] fp32, without a graph.

        fp32 keeps the residuals of a bf16 reference in fp32, where those of the autocast master weights are.
        """
        with torch.no_grad():
            embeddings: torch.Tensor = _input_weight(model)[self._tensor(batch.input_ids_T)]
        return embeddings[None].float()

    def _add_embedding_gradient(self, batch: PackedBatch, embeddings: torch.Tensor) -> None:
        """Add the gradient of T rows to that of the input embedding.

        Autograd would first make a V × H gradient of mostly zeros. It would also drop the rows of the padding token,
        which in many tokenizers ends a sequence as well and is a real input here.
        """
        assert embeddings.grad is not None
        weight = _input_weight(self._model)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, self._tensor(batch.input_ids_T), embeddings.grad[0])

    def _log_probs(self, model: PreTrainedModel, batch: PackedBatch, embeddings: torch.Tensor) -> torch.Tensor:
        """[N] of the response tokens of a micro-batch."""
        positions, predictor, target = (
            self._tensor(array) for array in (batch.position_ids_T, batch.predictor_N, batch.target_N)
        )
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            hidden_TH = model.base_model(
                inputs_embeds=embeddings,
                position_ids=positions[None],
                use_cache=False,
                layout=make_layout(batch.spans, self._device),
            ).last_hidden_state[0]
        return self.score(model, hidden_TH.index_select(0, predictor), target)

    def score(self, model: PreTrainedModel, hidden_NH: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
        """[N] what `log_probs` and the loss get of each response token, by the hidden state before it.

        Here its log-probability; a critic has the value of the state. The losses of a subclass find it as
        `LossInputs.log_probs_N`.
        """
        head = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return token_log_probs(hidden_NH, head, target_N, temperature=self._temperature, dtype=self._dtype)

    def _loss_inputs(self, batch: PackedBatch, log_probs_N: torch.Tensor) -> LossInputs:
        old, on_policy = batch.old_log_probs_N, batch.on_policy_N
        return LossInputs(
            log_probs_N=log_probs_N,
            old_log_probs_N=log_probs_N.detach() if old is None else self._tensor(old),
            mask_N=self._tensor(batch.mask_N),
            sample_N=self._tensor(batch.sample_N),
            samples=batch.samples,
            columns_N={name: self._tensor(values) for name, values in batch.columns_N.items()},
            on_policy_N=None if on_policy is None else self._tensor(on_policy),
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _gradient_norm(self) -> float:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _step(self, scale: float, rate: float) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _refuse(self, sums: _Sums, loss: float, norm: float, rate: float) -> UpdateResult:
        """Skip a step whose loss or gradient is not finite, and keep what it saw."""
        self._evidence = {
            "update": self._counters.updates - 1,
            "loss": _json(loss),
            "gradient_norm": _json(norm),
            "denominator": sums.denominator,
            "micro_batches": [
                {"groups": groups, "loss_sum": _json(loss_sum)}
                for groups, loss_sum in zip(sums.groups, sums.losses, strict=True)
            ],
            "gradient_norms": {
                name: _json(float(parameter.grad.norm()))
                for name, parameter in self._model.named_parameters()
                if parameter.grad is not None
            },
        }
        self._counters.skipped_in_a_row += 1
        if self._counters.skipped_in_a_row >= self._config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self._counters.skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient "
                f"(the last: loss {loss}, gradient norm {norm}); lower trainer.lr, or raise "
                f"trainer.max_nonfinite_steps if such steps are expected"
            )
        return self._skipped(sums, loss, norm, rate)

    def _skipped(self, sums: _Sums, loss: float, norm: float, rate: float) -> UpdateResult:
        self._optimizer.zero_grad()
        metrics = sums.means() if sums.metrics.get("tokens") else {}
        return UpdateResult(applied=False, loss=loss, grad_norm=norm, lr=rate, metrics=metrics)


def _json(value: float) -> float | str:
    """A number, or its name where JSON has no word for it."""
    return value if math.isfinite(value) else str(value)


def _input_weight(model: PreTrainedModel) -> torch.nn.Parameter:
    return cast(torch.nn.Parameter, model.get_input_embeddings().weight)


def _indices(parts: Sequence[GroupPart]) -> list[int]:
    return [index for part in parts for index in part.indices]


def _ends(parts: Sequence[GroupPart]) -> np.ndarray[Any, Any]:
    """Where one sample's response tokens end and the next one's begin among the N."""
    return np.cumsum([len(sample.response_ids) for part in parts for sample in part.samples])[:-1]
