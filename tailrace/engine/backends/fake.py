"""An engine without a model, for tests and for trying a pipeline out."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.config.engine import FakeEngineConfig
from tailrace.engine.backends.base import Backend
from tailrace.engine.base import Engine, EngineArgs, EngineStats
from tailrace.engine.driver import Core, DrivenEngine, check_prompt
from tailrace.errors import ConfigError
from tailrace.models.info import describe_model
from tailrace.planning.engine_size import EngineSize
from tailrace.types import FinishReason, FloatArray, IntArray, Request, Sample, WeightVersion

if TYPE_CHECKING:
    from tailrace.engine.model.weights import Weights

MAX_MODEL_LEN = 65536


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Script:
    """The response to a request, written in advance."""

    response_ids: IntArray
    """[R], where R is at least 1."""
    log_probs: FloatArray
    """[R]"""
    finish_reason: FinishReason


Playwright = Callable[[Request], Script]


class RandomPlaywright:
    """Writes uniform tokens, and lengths between 1 and the longest allowed; the request's seed decides."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, request: Request) -> Script:
        """Write the response to `request`."""
        random = np.random.default_rng(request.seed % 2**64)
        longest = min(request.sampling.max_new_tokens, MAX_MODEL_LEN - len(request.prompt_ids))
        length = longest if request.sampling.ignore_eos else int(random.integers(1, longest, endpoint=True))
        return Script(
            response_ids=random.integers(0, self._vocab_size, length),
            log_probs=-random.exponential(size=length).astype(np.float32),
            finish_reason=FinishReason.LENGTH if length == longest else FinishReason.STOP,
        )


@dataclass(slots=True, eq=False)
class _Response:
    """A script, and how far it has been played."""

    request: Request
    script: Script
    versions: list[WeightVersion] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.versions) == len(self.script.response_ids)

    def finish(self, reason: FinishReason) -> Sample:
        made = len(self.versions)
        tokens, log_probs = self.script.response_ids[:made], self.script.log_probs[:made]
        return Sample.of(self.request, tokens, log_probs, self.versions, reason)


class FakeCore(Core):
    """Plays scripts; each step gives one token of every response."""

    def __init__(self, playwright: Playwright) -> None:
        self.max_model_len = MAX_MODEL_LEN
        self._playwright = playwright
        self._responses: dict[int, _Response] = {}
        self._version: WeightVersion = 0
        self._steps = 0
        self._generated_tokens = 0
        self._prefilled_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._responses)

    def check(self, request: Request) -> None:
        """Check that the request can be served.

        Raises:
            RequestError: the request can never be served.
        """
        check_prompt(request, max_model_len=self.max_model_len)

    def add(self, request: Request) -> None:
        """Write the request's script. A prompt that is being answered already is not counted again."""
        if all(response.request.group_id != request.group_id for response in self._responses.values()):
            self._prefilled_tokens += len(request.prompt_ids)
        self._responses[request.request_id] = _Response(request, self._playwright(request))

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Finish these requests with what they have; unknown ids are ignored."""
        known = [self._responses.pop(request_id) for request_id in request_ids if request_id in self._responses]
        return [response.finish(FinishReason.ABORT) for response in known]

    def step(self) -> list[Sample]:
        """Give one token of every response. Return the samples that finished."""
        for response in self._responses.values():
            response.versions.append(self._version)
        self._steps += 1
        self._generated_tokens += len(self._responses)
        complete = [response for response in self._responses.values() if response.complete]
        for response in complete:
            del self._responses[response.request.request_id]
        return [response.finish(response.script.finish_reason) for response in complete]

    def load_weights(self, version: WeightVersion, tensors: "Weights") -> None:
        """Read and drop the tensors; keep the version."""
        for _ in tensors:
            pass
        self._version = version

    def stats(self) -> EngineStats:
        """Return the counts; there are no blocks."""
        return EngineStats(
            running=len(self._responses),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            steps=self._steps,
            version=self._version,
        )


class FakeEngine(DrivenEngine):
    """Plays a script for each request: a random one, or what `playwright` writes."""

    def __init__(self, *, executor: Executor, playwright: Playwright) -> None:
        super().__init__(FakeCore(playwright), executor)


class FakeBackend(Backend):
    """The backend of the fake engine, which has no weights and no cache."""

    def __init__(self, config: FakeEngineConfig) -> None:
        self._config = config

    def make(self, args: EngineArgs) -> Engine:
        """Make an engine with random responses."""
        return FakeEngine(executor=args.executor, playwright=RandomPlaywright(self._config.vocab_size))

    @property
    def size(self) -> EngineSize:
        """No model, and so neither memory nor time."""
        return EngineSize(has_model=False)

    def check(self, model_dir: Path, *, device: torch.device) -> None:
        """Check that the model has all tokens that the engine may draw.

        Raises:
            ConfigError: the model has fewer tokens.
        """
        vocab = describe_model(model_dir).vocab
        if self._config.vocab_size > vocab:
            raise ConfigError(
                f"engine.vocab_size {self._config.vocab_size} is more than the {vocab} tokens of the model; lower it"
            )
