"""Log-probabilities of responses under the weights of a model, packed as for training."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from tailrace.errors import ModelError
from tailrace.host.stopwatch import Stopwatch
from tailrace.models.loading import check_model, load_model
from tailrace.trainer.attention import PROMPT_SHARED, make_layout
from tailrace.trainer.base import TrainerArgs, TrainSample
from tailrace.trainer.log_probs import token_log_probs
from tailrace.trainer.memory import bytes_of
from tailrace.trainer.packing import GroupPart, PackedBatch, pack, plan_micro_batches
from tailrace.trainer.rows import take_rows
from tailrace.types import FloatArray


class Scorer:
    """A model on one device that scores response tokens. Its weights stay frozen, except in a trainer.

    They are in the dtype that training computes in (`trainer.precision`), 2 or 4 bytes a parameter.
    """

    def __init__(self, args: TrainerArgs) -> None:
        """Load the weights.

        Raises:
            ModelError: see `check_model`; or a weight is not a finite number.
        """
        self._config = args.config
        self.model_dir = args.model_dir
        self._device = torch.device(args.device)
        self._temperature = args.temperature or 1.0
        self._dtype = torch.bfloat16 if args.config.precision == "bf16" else torch.float32
        self._stopwatch = Stopwatch()
        """The time of the work by part, on the host's clock."""
        self._model = self._open()
        self._bytes = bytes_of(self._model.parameters())

    def _open(self) -> PreTrainedModel:
        return self.load_model(self._dtype).requires_grad_(False)

    def load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """Load the initial weights onto the device. A subclass may add parameters, such as a critic's head.

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

    def log_probs(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """[R] log-probabilities of each sample's response tokens, without gradients, at the sampling temperature."""
        results = [np.zeros(0, np.float32)] * len(samples)
        self._stopwatch.start()
        with torch.no_grad():
            for parts in plan_micro_batches(samples, self._config.micro_batch_tokens):
                batch = pack(parts)
                self._stopwatch.lap("data")
                values = self._scores(batch, self._embed(batch)).cpu().numpy()
                self._stopwatch.lap("forward")
                for index, row in zip(_indices(parts), np.split(values, _ends(parts)), strict=True):
                    results[index] = row
        return results

    def memory(self) -> Mapping[str, int]:
        """See `Trainer.memory`."""
        return {"weights": self._bytes}

    def score(self, hidden_NH: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
        """[N] the score of each response token from the hidden state before it, for `log_probs` and the loss.

        Here it is the token's log-probability; a critic returns the value of the state. The loss of a subclass gets it
        as `LossInputs.log_probs_N`.
        """
        head = self._model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return token_log_probs(hidden_NH, head, target_N, temperature=self._temperature, dtype=self._dtype)

    def _scores(self, batch: PackedBatch, embeddings: torch.Tensor) -> torch.Tensor:
        """[N] the scores of the response tokens of a micro-batch."""
        positions, predictor, target, scored = (
            self._tensor(array) for array in (batch.position_ids_T, batch.predictor_U, batch.target_U, batch.scored_N)
        )
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            hidden_TH = self._model.base_model(
                inputs_embeds=embeddings,
                position_ids=positions[None],
                use_cache=False,
                layout=make_layout(batch.spans, self._device),
            ).last_hidden_state[0]
        scores = self.score(take_rows(hidden_TH, predictor), target)
        return take_rows(scores[:, None], scored)[:, 0]

    def _embed(self, batch: PackedBatch) -> torch.Tensor:
        """The input embeddings, [1, T, H] fp32, without a graph.

        fp32 keeps the residuals of frozen bf16 weights in fp32, as those of the autocast master weights are.
        """
        with torch.no_grad():
            embeddings: torch.Tensor = self._input_weight[self._tensor(batch.input_ids_T)]
        return embeddings[None].float()

    @property
    def _input_weight(self) -> torch.nn.Parameter:
        return cast(torch.nn.Parameter, self._model.get_input_embeddings().weight)

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _indices(parts: Sequence[GroupPart]) -> list[int]:
    return [index for part in parts for index in part.indices]


def _ends(parts: Sequence[GroupPart]) -> np.ndarray[Any, Any]:
    """The places among the N response tokens at which one sample's end and the next one's begin."""
    return np.cumsum([len(sample.response_ids) for part in parts for sample in part.samples])[:-1]
