"""The trainer of one process and one device.

samples ──plan──▶ micro-batches ──forward──▶ log-probabilities ──loss──▶ sums ──backward──▶ .grad += …
apply: .grad / denominator, clip, AdamW, schedule
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput, add_metrics, is_maximum
from tailrace.errors import NonFiniteError
from tailrace.host.ordered_sums import add_rows
from tailrace.trainer import state
from tailrace.trainer.base import Loss, Trainer, TrainerArgs, TrainSample, UpdateResult
from tailrace.trainer.memory import TrainerMemory
from tailrace.trainer.optimizer import learning_rate, make_optimizer
from tailrace.trainer.packing import GroupPart, PackedBatch, pack, plan_micro_batches
from tailrace.trainer.scorer import Scorer


@dataclass(slots=True)
class _Sums:
    """The sums since the last optimizer step, besides the gradients."""

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
        add_metrics(self.metrics, output.metrics)

    def means(self) -> dict[str, float]:
        """The means of the metrics over the trained tokens, or their sums where there is no such token."""
        tokens = self.metrics.get("tokens") or 1.0
        return {
            name: value if name == "tokens" or is_maximum(name) else value / tokens
            for name, value in self.metrics.items()
        }


class SingleTrainer(Scorer, Trainer):
    """Master weights and optimizer in fp32 on one device; bf16 autocast on request.

    A subclass may train another model or in another way: see `load_model`, `score` and `make_optimizer`.
    """

    def __init__(self, args: TrainerArgs) -> None:
        """Load the weights.

        Raises:
            ModelError: see `Scorer`.
        """
        super().__init__(args)
        self._rate = partial(
            learning_rate, self._config, total_updates=args.total_updates, frozen_updates=args.frozen_updates
        )
        self._optimizer = self.make_optimizer(self._model)
        self._counters = state.Counters()
        self._sums = _Sums()
        self._evidence: dict[str, Any] = {}
        self._memory = TrainerMemory(self._model, self._optimizer)

    def _open(self) -> PreTrainedModel:
        model = self.load_model(torch.float32)
        model.train()
        if self._config.gradient_checkpointing:
            # transformers 5.19, the newest that vLLM accepts, has the old name
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)()
        return model

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer; the constructor calls it once. A subclass may make another, whose state must be tensors.

        `apply` sets the learning rate of each of its parameter groups to that of the schedule.
        """
        return make_optimizer(model, self._config)

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        """See `Trainer`."""
        self._stopwatch.start()
        for parts in plan_micro_batches(samples, self._config.micro_batch_tokens):
            batch = pack(parts)
            self._stopwatch.lap("data")
            embeddings = self._embed(batch).requires_grad_()
            output = loss(self._loss_inputs(batch, self._scores(batch, embeddings)))
            self._stopwatch.lap("forward")
            output.loss_sum.backward()  # type: ignore[no-untyped-call]
            self._add_embedding_gradient(batch, embeddings)
            self._sums.add(parts, output)  # reads the loss, and so waits for the device
            self._stopwatch.lap("backward")
            self._memory.note()

    def apply(self) -> UpdateResult:
        """See `Trainer`."""
        self._stopwatch.start()
        try:
            return self._apply()
        finally:
            self._stopwatch.lap("optimizer")
            self._memory.note()

    def _apply(self) -> UpdateResult:
        sums, self._sums = self._sums, _Sums()
        rate = self._rate(self._counters.updates)
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
        """See `Trainer`."""
        self._sums = _Sums()
        self._optimizer.zero_grad()
        self._memory.note()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trainer`."""
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def save(self, directory: Path) -> None:
        """See `Trainer`."""
        state.save(directory, self._model, self._optimizer, self._counters)

    def load(self, directory: Path) -> None:
        """See `Trainer`."""
        self._counters = state.load(directory, self._model, self._optimizer)
        self.discard()

    def take_seconds(self) -> Mapping[str, float]:
        """See `Trainer`."""
        return self._stopwatch.take()

    def memory(self) -> Mapping[str, int]:
        """See `Trainer`."""
        return self._memory.take()

    def evidence(self) -> dict[str, Any]:
        """See `Trainer`."""
        return self._evidence

    def _add_embedding_gradient(self, batch: PackedBatch, embeddings: torch.Tensor) -> None:
        """Add the gradient of T embedding rows to that of the input embedding.

        Autograd would first make a V × H gradient of mostly zeros. It would also drop the rows of the padding token,
        which in many tokenizers also ends a sequence, and is a real input here.
        """
        assert embeddings.grad is not None
        weight = self._input_weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        add_rows(weight.grad, self._tensor(batch.input_ids_T), embeddings.grad[0])

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
        """Skip a step whose loss or gradient is not finite, and keep the evidence."""
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
        return UpdateResult(applied=False, loss=loss, grad_norm=norm, lr=rate, metrics=sums.means())


def _json(value: float) -> float | str:
    """A number, or its name where JSON cannot express it."""
    return value if math.isfinite(value) else str(value)
