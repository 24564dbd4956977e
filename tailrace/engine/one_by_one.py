"""A core for backends that give a whole response at a time: one request in each step.

What a response is stays ours: the stop rules end it, its tokens carry the version of the weights that made them, and
new weights are checked before any is installed. The backend computes.
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
    """Tells when a response ends; to be asked with each of its tokens once, in their order."""

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
    """Queues requests, and has each answered by `generate`."""

    def __init__(
        self, model_dir: Path, *, max_model_len: int, vocab_size: int, shapes: Mapping[str, Shape], tied: bool
    ) -> None:
        """The weights that the backend has read are version 0.

        Args:
            model_dir: a Hugging Face directory, for its end-of-sequence tokens and its tokenizer.
            max_model_len: prompt and response tokens of a sequence at most.
            vocab_size: tokens of prompts are 0 … vocab_size - 1.
            shapes: of each parameter, by its HF name; without the head, where it is tied.
            tied: the embedding is the output head too.
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
        """The tokens of one response, up to and with the first for which `end(token)` is true.

        `request.seed` alone decides what is drawn. Beside the tokens stands the log-probability of each under the
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
        """Whether the request can be served.

        Raises:
            RequestError: it can never be.
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
        """Generate one whole response, or what there is of it when it is aborted."""
        request = self._waiting.popleft()
        end = End(self._stop_rules.rule(request), lambda: self._interrupted or request.request_id in self.to_abort)
        tokens, log_probs = self.generate(request, end)
        assert end.reason is not None, "generate returned before end(token) was true"
        self._steps += 1
        self._generated_tokens += len(tokens)
        self._prefilled_tokens += len(request.prompt_ids)
        return [self._sample(request, tokens, log_probs, end.reason)]

    def interrupt(self) -> None:
        """From any thread: the request under way ends at its next token."""
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
        """Counts; there are no blocks."""
        return EngineStats(
            waiting=len(self._waiting),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            steps=self._steps,
            version=self._version,
        )

    def _sample(self, request: Request, tokens: list[int], log_probs: list[float], reason: FinishReason) -> Sample:
        return Sample.of(request, tokens, log_probs, [self._version] * len(tokens), reason)
