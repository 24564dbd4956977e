"""The bodies of requests, checked. What would be ignored is refused, so that no answer is other than was asked for.

As in OpenAI's API, null stands for a field that is left out. A field of that API that is not served may have the value
that changes nothing: many clients send all fields.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic import ValidationError

from tailrace.config.engine import SamplingConfig
from tailrace.config.explain import explain
from tailrace.errors import UNREADABLE, did_you_mean, quoted
from tailrace.types import IntArray, WeightVersion

MOST_SAMPLES = 128
"""`n` of one request."""
_SEEDS = 2**63
"""Seeds are below this, and not below its negative; as OpenAI's, they have 64 bits."""
_NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
"""Fields of OpenAI's API that are not served, and the value of each that changes nothing."""
_PLACE = re.compile(r"(?P<what>.*) - at `\$\.(?P<field>\w+)(?P<inner>.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`(?P<inner> - at `\$\..*`)?")
"""Messages of msgspec."""


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


class ChatBody(_Sampled, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
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
        if given.logprobs is not None and given.logprobs not in (0, 1):
            raise Refusal("logprobs gives those of the tokens alone; use 0 or 1", param="logprobs")
        prompts = self._prompts(given.prompt)
        room = max(1, min(16, self.max_model_len - max(map(len, prompts))))
        most = "max_tokens", room if given.max_tokens is None else given.max_tokens
        return self._asked(given, prompts, is_chat=False, most=most, log_probs=given.logprobs is not None)

    def chatted(self, body: bytes) -> Asked:
        """Read the body of `/v1/chat/completions`.

        Raises:
            Refusal: it is none, or cannot be served.
        """
        given = _decoded(body, ChatBody)
        if not given.messages:
            raise Refusal("messages is empty; give one", param="messages")
        try:
            tokens = self.chat([_as_text(message) for message in given.messages], given.chat_template_kwargs)
        except ValueError as error:
            raise Refusal(str(error), param="messages") from None
        prompts = (np.array(tokens, np.int64),)
        limits = {"max_completion_tokens": given.max_completion_tokens, "max_tokens": given.max_tokens}
        room = max(1, self.max_model_len - len(tokens))
        most = next(((name, limit) for name, limit in limits.items() if limit is not None), ("max_tokens", room))
        return self._asked(given, prompts, is_chat=True, most=most, log_probs=given.logprobs)

    def check_model(self, name: str) -> None:
        """Check the name of a model.

        Raises:
            Refusal: it is not the one that is served.
        """
        if name != self.model:
            text = f"the model {quoted(name)} is not served; {self.model!r} is"
            raise Refusal(text, status=404, code="model_not_found", param="model")

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
        self, given: _Sampled, prompts: tuple[IntArray, ...], *, is_chat: bool, most: tuple[str, int], log_probs: bool
    ) -> Asked:
        """`most`: the field that limits the tokens of a response, and its value."""
        self.check_model(given.model)
        for prompt in prompts:
            self._check(prompt, most)
        if not 1 <= given.n <= MOST_SAMPLES:
            raise Refusal(f"n is {given.n}; give 1 to {MOST_SAMPLES}", param="n")
        if given.seed is not None and not -_SEEDS <= given.seed < _SEEDS:
            raise Refusal(f"seed is {given.seed}; give {-_SEEDS} to {_SEEDS - 1}", param="seed")
        if given.stream_options is not None and not given.stream:
            raise Refusal("stream_options is for streams alone; leave it out, or set stream", param="stream_options")
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
        if given.ignore_eos and (stop or given.stop_token_ids):
            name = "stop" if stop else "stop_token_ids"
            raise Refusal(f"ignore_eos lets nothing end a response but its length; leave it or {name} out", param=name)
        try:
            sampling = SamplingConfig(
                max_new_tokens=most[1],
                temperature=given.temperature,
                top_p=given.top_p,
                top_k=given.top_k,
                min_p=given.min_p,
                stop=tuple(stop),
                stop_token_ids=tuple(given.stop_token_ids),
                ignore_eos=given.ignore_eos,
            )
        except ValidationError as error:
            problem = error.errors()[0]
            text = explain(SamplingConfig, [problem], lambda value, _: value).replace("max_new_tokens", most[0])
            raise Refusal(text, param=str(problem["loc"][0]).replace("max_new_tokens", most[0])) from None
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

    def _check(self, prompt: IntArray, most: tuple[str, int]) -> None:
        name, limit = most
        if not len(prompt):
            raise Refusal("prompt has no tokens; give one at least", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise Refusal(
                f"the prompt has {len(prompt)} tokens, and the context of {self.max_model_len} has to hold one more",
                code="context_length_exceeded",
                param="prompt",
            )
        if limit > (room := self.max_model_len - len(prompt)):
            raise Refusal(
                f"{name} is {limit}, and the prompt's {len(prompt)} tokens leave room for {room} in the context of "
                f"{self.max_model_len}; give at most {room}, or leave it out",
                code="context_length_exceeded",
                param=name,
            )


def _decoded(body: bytes, kind: type[Body]) -> Body:
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        values = {name: value for name, value in given.items() if bytes(value) != b"null"}
        for name in values.keys() & _NEUTRAL.keys():
            if msgspec.json.decode(values.pop(name)) != _NEUTRAL[name]:
                text = f"{name} is not supported; leave it out, or give {msgspec.json.encode(_NEUTRAL[name]).decode()}"
                raise Refusal(text, param=name)
        return msgspec.json.decode(msgspec.json.encode(values), type=kind)
    except UNREADABLE as error:
        raise _unreadable(str(error), kind) from None


def _unreadable(error: str, kind: type[_Sampled]) -> Refusal:
    """What to say of an error of msgspec: the field, where it is known."""
    if (found := _UNKNOWN.fullmatch(error)) and not found["inner"]:
        name = found["field"]
        near = did_you_mean(name, [*kind.__struct_fields__])
        return Refusal(f"there is no field {quoted(name)}{near or '; leave it out'}", param=name)
    if found := _PLACE.fullmatch(error):
        what = f"{found['what'][0].lower()}{found['what'][1:]}"
        return Refusal(f"{found['field']}{found['inner']}: {what}", param=found["field"])
    return Refusal(f"the body cannot be read: {error}")


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text. Parts of text become the lines of one.

    Raises:
        ValueError: a part is none of text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f"messages have a part {quoted(part)}, and only text is served; give parts of type text")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
