"""transformers `generate` behind the engine interface: slow, and the oracle of the others."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from tailrace.config.engine import HfEngineConfig, SamplingConfig
from tailrace.engine.architecture import read_eos_ids
from tailrace.engine.base import EngineStats
from tailrace.engine.driver import DrivenEngine, check_prompt
from tailrace.engine.kv_cache import DTYPES
from tailrace.engine.stopping import StopRule, StopRules
from tailrace.engine.weights import Weights, collect_weights
from tailrace.errors import ModelError
from tailrace.types import FinishReason, Request, Sample, WeightVersion


class _RuleCriteria(StoppingCriteria):
    """Asks our stop rule, and whether the request is still wanted; remembers the answer."""

    def __init__(self, rule: StopRule, prompt_length: int, *, aborted: Callable[[], bool]) -> None:
        self._rule = rule
        self._prompt_length = prompt_length
        self._aborted = aborted
        self.reason: FinishReason | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.reason = self._rule.check(int(input_ids[0, -1]), input_ids.shape[1] - self._prompt_length)
        if self.reason is None and self._aborted():
            self.reason = FinishReason.ABORT
        return torch.tensor([self.reason is not None], device=input_ids.device)


class HfCore:
    """Answers one request in each step."""

    def __init__(self, config: HfEngineConfig, model_dir: Path, *, device: torch.device) -> None:
        """Read the model, with its weights as version 0.

        Raises:
            ModelError: there is none.
        """
        dtype = DTYPES[config.dtype]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the terminal is the run's display
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ModelError(f"{model_dir} holds no model that transformers reads: {error}") from error
        self._model = model.to(device).eval()
        self._model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # or its settings would mix with the request's
        self._device = device
        self._waiting: deque[Request] = deque()
        self.to_abort: Collection[int] = ()
        """Requests that are to be aborted: the one under way ends at its next token."""
        self._interrupted = False
        self._version: WeightVersion = 0
        self.weights_are_whole = True
        self._steps = 0
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self.max_model_len: int = self._model.config.max_position_embeddings
        self._stop_rules = StopRules(model_dir, eos_ids=read_eos_ids(model_dir), max_model_len=self.max_model_len)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting)

    def check(self, request: Request) -> None:
        """Whether the request can be served.

        Raises:
            RequestError: it can never be.
        """
        check_prompt(request, max_model_len=self.max_model_len, vocab_size=self._model.config.vocab_size)
        self._stop_rules.rule(request)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Finish these requests, which have not begun, without a token."""
        ids = set(request_ids)
        aborted = [request for request in self._waiting if request.request_id in ids]
        self._waiting = deque(request for request in self._waiting if request.request_id not in ids)
        return [self._sample(request, [], [], FinishReason.ABORT) for request in aborted]

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Generate one whole response, or what there is of it when it is aborted."""
        request = self._waiting.popleft()
        criteria = _RuleCriteria(
            self._stop_rules.rule(request),
            len(request.prompt_ids),
            aborted=lambda: self._interrupted or request.request_id in self.to_abort,
        )
        prompt = torch.tensor(request.prompt_ids, device=self._device)[None]
        with torch.random.fork_rng(devices=[] if self._device.type == "cpu" else [self._device]):
            torch.manual_seed(request.seed % 2**63)
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=_generation_config(request.sampling),
                stopping_criteria=StoppingCriteriaList([criteria]),
            )
        tokens = output.sequences[0, prompt.shape[1] :].tolist()
        log_probs = [
            float(scores[0].float().log_softmax(-1)[token]) for scores, token in zip(output.scores, tokens, strict=True)
        ]
        assert criteria.reason is not None
        self._steps += 1
        self._generated_tokens += len(tokens)
        self._prefilled_tokens += prompt.shape[1]
        return [self._sample(request, tokens, log_probs, criteria.reason)]

    def settle(self) -> list[Sample]:
        """Nothing is under way between two steps."""
        return []

    def interrupt(self) -> None:
        """From any thread: the request under way ends at its next token."""
        self._interrupted = True

    def close(self) -> None:
        """Holds nothing that must be given back."""

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        """Install new weights.

        Raises:
            EngineError: a name is unknown or missing, or a shape or dtype is wrong; the old weights stay.
        """
        tied = self._model.config.tie_word_embeddings
        expected = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        if tied:
            expected.pop("lm_head.weight", None)
        named = collect_weights(expected, tensors, tied=tied)
        self.weights_are_whole = False
        self._model.load_state_dict(named, strict=False)
        self.weights_are_whole = True
        self._version = version

    def stats(self) -> EngineStats:
        """Counts; there are no blocks."""
        return EngineStats(
            running=0,
            waiting=len(self._waiting),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            steps=self._steps,
            preemptions=0,
            used_blocks=0,
            total_blocks=0,
            version=self._version,
        )

    def _sample(self, request: Request, tokens: list[int], log_probs: list[float], reason: FinishReason) -> Sample:
        return Sample(
            request_id=request.request_id,
            group_id=request.group_id,
            response_ids=np.array(tokens, np.int64),
            rollout_log_probs=np.array(log_probs, np.float32),
            weight_versions=np.full(len(tokens), self._version, np.int64),
            finish_reason=reason,
        )


def _generation_config(sampling: SamplingConfig) -> GenerationConfig:
    """The same sampling in transformers' words. Our stop rule ends the response, so no other end is configured."""
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
    """One request at a time through transformers."""

    def __init__(self, config: HfEngineConfig, model_dir: Path, *, device: str, executor: Executor) -> None:
        core = HfCore(config, model_dir, device=torch.device(device))
        super().__init__(core, executor)
        core.to_abort = self._to_abort  # the set itself, which changes while a step is under way
