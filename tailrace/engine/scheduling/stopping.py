"""The end of a response: stop tokens, stop strings and length."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from tailrace.config.engine import SamplingConfig
from tailrace.errors import RequestError, one_line
from tailrace.types import FinishReason, Request

REPLACEMENT = "\ufffd"
MAX_PARTIAL_TOKENS = 8
"""No character takes more tokens than this. Text that is undecodable for longer will stay so."""


Detokenize = Callable[[list[int]], str]
"""Token ids to text."""


class StopStrings:
    """Finds stop strings in a growing response, also across tokens and within tokens that cut a character in two.

    Each token is decoded together with those of the last complete piece of text, since decoders treat the first token
    of a text differently.
    """

    def __init__(self, stop: Sequence[str], detokenize: Detokenize) -> None:
        self._stop = stop
        self._detokenize = detokenize
        self._keep = max(map(len, stop)) - 1
        self._tail = ""
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> bool:
        """Whether the text contains a stop string once `token` is added."""
        self._pending.append(token)
        context = self._detokenize(self._context)
        text = self._detokenize(self._context + self._pending)[len(context) :]
        complete = not text.endswith(REPLACEMENT) or len(self._pending) > MAX_PARTIAL_TOKENS
        searched = self._tail + (text if complete else text.rstrip(REPLACEMENT))
        if complete:
            self._tail = searched[-self._keep :] if self._keep else ""
            self._context, self._pending = self._pending, []
        return any(stop in searched for stop in self._stop)


class StopRule:
    """Decides when one response ends: at a stop token, a stop string, or its greatest length."""

    def __init__(
        self, sampling: SamplingConfig, *, eos_ids: Sequence[int], room: int, detokenize: Detokenize | None
    ) -> None:
        """`room` is the number of response tokens that fit the context. Only stop strings need `detokenize`."""
        self.max_tokens = min(sampling.max_new_tokens, room)
        self.stop_ids = frozenset() if sampling.ignore_eos else frozenset((*eos_ids, *sampling.stop_token_ids))
        self._strings: StopStrings | None = None
        if sampling.stop and not sampling.ignore_eos:
            assert detokenize is not None
            self._strings = StopStrings(sampling.stop, detokenize)

    def check(self, token: int, count: int) -> FinishReason | None:
        """Return the reason if `token` ends the response. Call this with every token once; `count` includes it."""
        if token in self.stop_ids or (self._strings is not None and self._strings.push(token)):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_tokens else None


class StopRules:
    """Makes the rule of each request; reads the model's tokenizer when the first stop string asks for it."""

    def __init__(self, model_dir: Path, *, eos_ids: Sequence[int], max_model_len: int) -> None:
        self._model_dir = model_dir
        self._eos_ids = eos_ids
        self._max_model_len = max_model_len

    def check(self, request: Request) -> None:
        """Check that this request's response can be ended as it asks.

        Raises:
            RequestError: the request has stop strings, and the model has no tokenizer to find them with; or its
                response has ended with the tokens that it begins with.
        """
        if request.sampling.stop:
            self._check_tokenizer(request)
        if request.begun is not None:
            _, reason = self._begun(request)
            if reason is not None:
                raise RequestError(
                    f"request {request.request_id} goes on with a response that has ended with its "
                    f"{len(request.begun.response_ids)} tokens, by {reason.value}"
                )

    def rule(self, request: Request) -> StopRule:
        """Make the rule of a request that `check` accepted. It knows the tokens that the response begins with."""
        rule, _ = self._begun(request)
        return rule

    def _begun(self, request: Request) -> tuple[StopRule, FinishReason | None]:
        """The rule after the tokens that the response begins with, and the reason why it ends with one of them."""
        rule = StopRule(
            request.sampling,
            eos_ids=self._eos_ids,
            room=self._max_model_len - len(request.prompt_ids),
            detokenize=self._detokenize if request.sampling.stop else None,
        )
        tokens = [] if request.begun is None else request.begun.response_ids.tolist()
        reasons = (rule.check(token, count) for count, token in enumerate(tokens, 1))
        return rule, next((reason for reason in reasons if reason is not None), None)

    def _check_tokenizer(self, request: Request) -> None:
        """Raise a RequestError where there is no tokenizer."""
        try:
            _ = self._detokenize
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise RequestError(
                f"request {request.request_id} has stop strings, and {self._model_dir} has no tokenizer to find "
                f"them with; use stop_token_ids, or add the tokenizer's files ({one_line(error)})"
            ) from error

    @functools.cached_property
    def _detokenize(self) -> Detokenize:
        return _read_detokenizer(self._model_dir)


def _read_detokenizer(model_dir: Path) -> Detokenize:
    """Read the tokenizer in a model's directory. Special tokens are text too, so a stop string may be one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes up for Qwen without files
        raise ValueError("it knows special tokens only")
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
