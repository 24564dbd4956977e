"""transformers `generate` behind the engine interface: slow, and the oracle of the other engines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from tailrace.config.engine import HfEngineConfig, SamplingConfig
from tailrace.engine.backends.base import Backend
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.driver import DrivenEngine
from tailrace.engine.kv_cache import DTYPES
from tailrace.engine.one_by_one import End, OneByOneCore
from tailrace.models.loading import load_model
from tailrace.planning.engine_size import EngineSize
from tailrace.types import Request


class _EndCriteria(StoppingCriteria):
    """Ends a response where our stop rules do."""

    def __init__(self, end: End) -> None:
        self._end = end

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([self._end(int(input_ids[0, -1]))], device=input_ids.device)


class HfCore(OneByOneCore):
    """Answers one request in each step."""

    def __init__(self, config: HfEngineConfig, model_dir: Path, *, device: torch.device) -> None:
        """Read the model, with its weights as version 0.

        Raises:
            ModelError: the model cannot be read.
        """
        model: Any = load_model(model_dir, dtype=DTYPES[config.dtype])
        self._model = model.to(device).eval()
        self._model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # or its settings would mix with the request's
        self._device = device
        super().__init__(
            model_dir,
            max_model_len=self._model.config.max_position_embeddings,
            vocab_size=self._model.config.vocab_size,
            shapes={name: tuple(tensor.shape) for name, tensor in self._model.named_parameters()},
            tied=self._model.config.tie_word_embeddings,
        )

    @torch.no_grad()
    def generate(self, request: Request, end: End) -> tuple[list[int], list[float]]:
        """See `OneByOneCore`."""
        prompt = torch.tensor(request.prompt_ids, device=self._device)[None]
        with torch.random.fork_rng(devices=[] if self._device.type == "cpu" else [self._device]):
            torch.manual_seed(request.seed % 2**63)
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=_generation_config(request.sampling),
                stopping_criteria=StoppingCriteriaList([_EndCriteria(end)]),
            )
        tokens = output.sequences[0, prompt.shape[1] :].tolist()
        log_probs = [
            float(scores[0].float().log_softmax(-1)[token]) for scores, token in zip(output.scores, tokens, strict=True)
        ]
        return tokens, log_probs

    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `OneByOneCore`."""
        self._model.load_state_dict(weights, strict=False)


def _generation_config(sampling: SamplingConfig) -> GenerationConfig:
    """Translate the sampling into transformers' words. Our stop rule ends the response, so no other is configured."""
    settings: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        settings = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=sampling.max_new_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )


class HfEngine(DrivenEngine):
    """Answers one request at a time through transformers."""

    def __init__(self, config: HfEngineConfig, args: EngineArgs) -> None:
        super().__init__(HfCore(config, args.model_dir, device=torch.device(args.device)), args.executor)


class HfBackend(Backend):
    """The backend of the hf engine, which holds the weights once and answers one request at a time."""

    def __init__(self, config: HfEngineConfig) -> None:
        self._config = config

    def make(self, args: EngineArgs) -> Engine:
        """See `HfCore`."""
        return HfEngine(self._config, args)

    @property
    def size(self) -> EngineSize:
        """One copy, which answers one request at a time."""
        return EngineSize(dtype=self._config.dtype)
