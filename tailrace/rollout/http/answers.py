"""The JSON of answers, whole and in chunks, as OpenAI's API has it.

Beside OpenAI's fields, a choice has `token_ids` where they are asked for, and `weight_versions`: the oldest and the
newest version that made a token of it.
"""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tailrace.rollout.http.asked import Asked
from tailrace.types import FinishReason, Sample

DONE = b"data: [DONE]\n\n"
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}

TokenText = Callable[[int], str]
"""The text of one token by itself."""


class Answers:
    """The answers to one request."""

    def __init__(self, asked: Asked, token_text: TokenText) -> None:
        self._asked = asked
        self._token_text = token_text
        kind = "chatcmpl" if asked.is_chat else "cmpl"
        self._id = f"{kind}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._told: Counter[int] = Counter()
        """The characters of each choice's tokens that earlier chunks have told."""

    def whole(self, choices: Sequence[tuple[str, Sample]]) -> bytes:
        """The answer. `choices`: the text and the sample of each, in order."""
        name = "chat.completion" if self._asked.is_chat else "text_completion"
        of = [self._choice(index, text, sample) for index, (text, sample) in enumerate(choices)]
        made = sum(len(sample.response_ids) for _, sample in choices)
        return msgspec.json.encode({**self._head(name), "choices": of, "usage": self._usage(made)})

    def role(self, index: int) -> bytes:
        """The first chunk of a choice of a chat."""
        return self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def piece(self, index: int, text: str, tokens: Sequence[int], log_probs: Sequence[float]) -> bytes:
        """The newest text of a choice, and its tokens."""
        return self._chunk([self._delta(index, text, tokens, log_probs, None)])

    def end(self, index: int, text: str, tokens: Sequence[int], log_probs: Sequence[float], sample: Sample) -> bytes:
        """The rest of a choice, and why it ended."""
        choice = self._delta(index, text, tokens, log_probs, _REASONS[sample.finish_reason])
        return self._chunk([{**choice, "weight_versions": _versions(sample)}])

    def usage(self, made: int) -> bytes:
        """The last chunk, where the usage is asked for."""
        return _event({**self._head(self._chunk_name), "choices": [], "usage": self._usage(made)})

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._asked.is_chat else "text_completion"

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return _event({**self._head(self._chunk_name), "choices": choices})

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._asked.model}

    def _usage(self, made: int) -> dict[str, int]:
        prompt = sum(map(len, self._asked.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _choice(self, index: int, text: str, sample: Sample) -> dict[str, Any]:
        tokens, log_probs = sample.response_ids.tolist(), sample.rollout_log_probs.tolist()
        said = {"message": {"role": "assistant", "content": text}} if self._asked.is_chat else {"text": text}
        return {
            "index": index,
            **said,
            "logprobs": self._log_probs(tokens, log_probs, choice=index),
            "finish_reason": _REASONS[sample.finish_reason],
            **({"token_ids": tokens} if self._asked.token_ids else {}),
            "weight_versions": _versions(sample),
        }

    def _delta(
        self, index: int, text: str, tokens: Sequence[int], log_probs: Sequence[float], reason: str | None
    ) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self._asked.is_chat else {"text": text}
        return {
            "index": index,
            **said,
            "logprobs": self._log_probs(tokens, log_probs, choice=index),
            "finish_reason": reason,
            **({"token_ids": list(tokens)} if self._asked.token_ids else {}),
        }

    def _log_probs(self, tokens: Sequence[int], log_probs: Sequence[float], *, choice: int) -> dict[str, Any] | None:
        if not self._asked.log_probs:
            return None
        texts = [self._token_text(token) for token in tokens]
        if self._asked.is_chat:
            content = [
                {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
                for text, value in zip(texts, log_probs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(self._told[choice])
            self._told[choice] += len(text)
        return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": None, "text_offset": offsets}


def error_body(message: str, code: str, param: str) -> bytes:
    """The body of an error."""
    kind = "server_error" if code in ("server_error", "timeout") else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param or None, "code": code}})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None where it is a part of a character, whose bytes are not known."""
    return None if "\ufffd" in text else list(text.encode())


def _versions(sample: Sample) -> list[int]:
    versions = sample.weight_versions
    return [int(versions.min()), int(versions.max())] if len(versions) else []
