"""A core for backends that give a whole response at a time: each step answers one request.

Our stop rules end the responses, and the tokens carry the version of the weights that made them. New weights are
checked before any is installed. The backend only computes.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from tailrace.engine.base import EngineStats
from tailrace.engine.driver import Core, check_prompt
from tailrace.engine.model.weights import Weights, collect_weights
from tailrace.engine.scheduling.stopping import StopRule, StopRules
from tailrace.models.architecture import Shape, read_eos_ids
from tailrace.types import FinishReason, Request, Sample, WeightVersion


class End:
    """Decides when a response ends. Call it once with each token, in order."""

    def __init__(self, rule: StopRule, aborted: Callable[[], bool]) -> None:
        self.reason: FinishReason | None = None
        self._rule = rule
        self._aborted = aborted
        self._count = 0

    def __call__(self, token: int) -> bool:
        """Whether `token`, which belongs to the response, is its last."""
        self._count += 1
        self.reason = self._rule.check(token, self._count)
        if self.reason is None and self._aborted():
            self.reason = FinishReason.ABORT
        return self.reason is not None


class OneByOneCore(Core, ABC):
    """Queues requests, and answers each with `generate`."""

    def __init__(
        self, model_dir: Path, *, max_model_len: int, vocab_size: int, shapes: Mapping[str, Shape], tied: bool
    ) -> None:
        """Start with the weights that the backend has read, as version 0.

        Args:
            model_dir: A Hugging Face directory, for its end-of-sequence tokens and its tokenizer.
            max_model_len: The most tokens of a sequence, prompt and response together.
            vocab_size: The size of the vocabulary; tokens of prompts are 0 … vocab_size - 1.
            shapes: The shape of each parameter, by its HF name; without the head, where it is tied.
            tied: Whether the embedding is the output head too.
        """
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._shapes = shapes
        self._tied = tied
        eos_ids = read_eos_ids(model_dir, vocab_size=vocab_size)
        self._stop_rules = StopRules(model_dir, eos_ids=eos_ids, max_model_len=max_model_len)
        self._waiting: deque[Request] = deque()
        self._interrupted = False
        self._version: WeightVersion = 0
        self._steps = 0
        self._generated_tokens = 0
        self._prefilled_tokens = 0

    @abstractmethod
    def generate(self, request: Request, end: End) -> tuple[list[int], list[float]]:
        """Generate the tokens of one response, up to and including the first for which `end(token)` is true.

        `request.seed` alone decides what is drawn. Return the tokens, and the log-probability of each under the
        distribution that it was drawn from; greedy, under the softmax at temperature 1.
        """

    @abstractmethod
    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy new weights: every parameter of `shapes`, whole, of any float dtype."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting)

    def check(self, request: Request) -> None:
        """Check that the request can be served.

        Raises:
            RequestError: the request can never be served.
        """
        check_prompt(request, max_model_len=self.max_model_len, vocab_size=self._vocab_size)
        self._stop_rules.check(request)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Finish these requests, which have not begun, without a token."""
        ids = set(request_ids)
        aborted = [request for request in self._waiting if request.request_id in ids]
        self._waiting = deque(request for request in self._waiting if request.request_id not in ids)
        return [self._sample(request, [], [], FinishReason.ABORT) for request in aborted]

    def step(self) -> list[Sample]:
        """Generate one whole response. When it is aborted, return the part that there is."""
        request = self._waiting.popleft()
        end = End(self._stop_rules.rule(request), lambda: self._interrupted or request.request_id in self.to_abort)
        tokens, log_probs = self.generate(request, end)
        assert end.reason is not None, "generate returned before end(token) was true"
        self._steps += 1
        self._generated_tokens += len(tokens)
        self._prefilled_tokens += len(request.prompt_ids)
        return [self._sample(request, tokens, log_probs, end.reason)]

    def interrupt(self) -> None:
        """End the request under way at its next token. Callable from any thread."""
        self._interrupted = True

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        """Install new weights.

        Raises:
            EngineError: a name is unknown or missing, or a shape or dtype is wrong; the old weights stay.
        """
        named = collect_weights(self._shapes, tensors, tied=self._tied)
        self.weights_are_whole = False
        self.install(named)
        self.weights_are_whole = True
        self._version = version

    def stats(self) -> EngineStats:
        """Return the counts; there are no blocks."""
        return EngineStats(
            waiting=len(self._waiting),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            steps=self._steps,
            version=self._version,
        )

    def _sample(self, request: Request, tokens: list[int], log_probs: list[float], reason: FinishReason) -> Sample:
        return Sample.of(request, tokens, log_probs, [self._version] * len(tokens), reason)
