"""The bodies of requests, checked. What would be ignored is refused, so that no answer is other than was asked for."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic import ValidationError

from tailrace.config.engine import SamplingConfig
from tailrace.errors import UNREADABLE
from tailrace.types import IntArray, WeightVersion

MOST_SAMPLES = 128
"""`n` of one request."""


class Refusal(Exception):
    """A request that gets an HTTP error."""

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_request_error", param: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class _Sampled(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What both kinds of requests may have."""

    model: str
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    top_k: int = 0
    """Not OpenAI's, like all below: see `SamplingConfig`."""
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    return_token_ids: bool = False
    """Answer with the tokens, too."""
    weight_version: int = 0
    """The version of the weights that it must at least have."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionBody(_Sampled, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`/v1/completions`."""

    prompt: str | list[Any]
    """A text, tokens, or a list of either."""
    logprobs: int | None = None
    echo: bool = False


class ChatBody(_Sampled, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = {}


Body = TypeVar("Body", CompletionBody, ChatBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that can be served."""

    is_chat: bool
    model: str
    prompts: tuple[IntArray, ...]
    """[P] each."""
    n: int
    sampling: SamplingConfig
    seed: int
    log_probs: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads bodies for one model."""

    model: str
    encode: Callable[[str], list[int]]
    """The tokens of a text, without any that are added."""
    chat: Callable[[list[dict[str, Any]], dict[str, Any]], list[int]]
    """The tokens of a chat, by the model's template; raises ValueError where it has none or refuses it."""
    max_model_len: int
    vocab_size: int

    def completion(self, body: bytes) -> Asked:
        """Read the body of `/v1/completions`.

        Raises:
            Refusal: it is none, or cannot be served.
        """
        given = _decoded(body, CompletionBody)
        if given.echo:
            raise Refusal("echo is not supported; leave it out", param="echo")
        if given.logprobs is not None and given.logprobs not in (0, 1):
            raise Refusal("logprobs gives those of the tokens alone; use 0 or 1", param="logprobs")
        prompts = self._prompts(given.prompt)
        return self._asked(
            given, prompts, is_chat=False, most=given.max_tokens or 16, log_probs=given.logprobs is not None
        )

    def chatted(self, body: bytes) -> Asked:
        """Read the body of `/v1/chat/completions`.

        Raises:
            Refusal: it is none, or cannot be served.
        """
        given = _decoded(body, ChatBody)
        if given.top_logprobs:
            raise Refusal("top_logprobs is not supported; logprobs gives those of the tokens", param="top_logprobs")
        if not given.messages:
            raise Refusal("messages is empty; give one", param="messages")
        try:
            tokens = self.chat(given.messages, given.chat_template_kwargs)
        except ValueError as error:
            raise Refusal(f"messages: {error}", param="messages") from None
        prompts = (np.array(tokens, np.int64),)
        room = self.max_model_len - len(tokens)
        most = given.max_completion_tokens or given.max_tokens or max(1, room)
        return self._asked(given, prompts, is_chat=True, most=most, log_probs=given.logprobs)

    def _prompts(self, prompt: str | list[Any]) -> tuple[IntArray, ...]:
        if not prompt:
            raise Refusal("prompt is empty; give a text or tokens", param="prompt")
        several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
        return tuple(map(self._tokens, prompt)) if several else (self._tokens(prompt),)

    def _tokens(self, prompt: object) -> IntArray:
        if isinstance(prompt, str):
            return np.array(self.encode(prompt), np.int64)
        if isinstance(prompt, list) and all(type(token) is int and 0 <= token < self.vocab_size for token in prompt):
            return np.array(prompt, np.int64)
        raise Refusal(
            f"prompt is neither text nor tokens from 0 to {self.vocab_size - 1}, nor a list of one of them",
            param="prompt",
        )

    def _asked(
        self, given: _Sampled, prompts: tuple[IntArray, ...], *, is_chat: bool, most: int, log_probs: bool
    ) -> Asked:
        if given.model != self.model:
            raise Refusal(
                f"the model {given.model!r} is not served; {self.model!r} is",
                status=404,
                code="model_not_found",
                param="model",
            )
        for prompt in prompts:
            self._check(prompt)
        if not 1 <= given.n <= MOST_SAMPLES:
            raise Refusal(f"n is {given.n}; give 1 to {MOST_SAMPLES}", param="n")
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
        try:
            sampling = SamplingConfig(
                max_new_tokens=most,
                temperature=given.temperature,
                top_p=given.top_p,
                top_k=given.top_k,
                min_p=given.min_p,
                stop=tuple(stop),
                stop_token_ids=tuple(given.stop_token_ids),
                ignore_eos=given.ignore_eos,
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])).replace("max_new_tokens", "max_tokens")
            raise Refusal(f"{name}: {first['msg']}; it is {first['input']!r}", param=name) from None
        return Asked(
            is_chat=is_chat,
            model=given.model,
            prompts=prompts,
            n=given.n,
            sampling=sampling,
            seed=secrets.randbits(63) if given.seed is None else given.seed,
            log_probs=log_probs,
            stream=given.stream,
            include_usage=given.stream_options is not None and given.stream_options.include_usage,
            token_ids=given.return_token_ids,
            version=given.weight_version,
        )

    def _check(self, prompt: IntArray) -> None:
        if not len(prompt):
            raise Refusal("prompt has no tokens; give one at least", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise Refusal(
                f"the prompt has {len(prompt)} tokens, and the context of {self.max_model_len} has to hold one more",
                code="context_length_exceeded",
                param="prompt",
            )


def _decoded(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise Refusal(f"the body cannot be read: {error}") from None
