"""The critic: a copy of a model whose head gives a value for each token.

It is a `SingleTrainer` in all else: packing, precision, checkpoints. Its optimizer has a learning rate of its own.
"""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from tailrace.algorithms.value_loss import with_explained_variance
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import UpdateResult


class Critic(SingleTrainer):
    """Any supported model with a value head, which begins at 0, in place of the head that gives tokens."""

    def load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """See `Scorer.load_model`."""
        model = super().load_model(dtype)
        head = torch.nn.Linear(model.config.hidden_size, 1, bias=False, dtype=dtype, device=self._device)
        torch.nn.init.zeros_(head.weight)
        model.value_head = head
        model.set_output_embeddings(torch.nn.Identity())  # type: ignore[no-untyped-call]
        return model

    def score(self, hidden_NH: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
        """[N] the value of the state before each response token."""
        weight: torch.Tensor = self._model.value_head.weight  # type: ignore[union-attr,assignment]
        return (hidden_NH.to(weight.dtype) @ weight[0]).float()

    def apply(self) -> UpdateResult:
        """See `Trainer`. Its metrics have the explained variance."""
        result = super().apply()
        return replace(result, metrics=with_explained_variance(result.metrics))
