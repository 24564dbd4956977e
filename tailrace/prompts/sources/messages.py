"""Conversations of a source, as chat messages with texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.errors import nearest
from tailrace.prompts.sources.cells import CellError, json_value, shown

Message = dict[str, Any]
"""A chat message: `role`, and `content`, a text. An assistant's message with `tool_calls` may have no content."""

ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(value: Sequence[Any]) -> list[Message]:
    """Read chat messages. Content that is a list of text parts becomes one text, joined without anything between.

    Raises:
        CellError: an item is no message, has an unknown role or no text, or there is nothing to answer.
    """
    if not value:
        raise CellError("the prompt is empty")
    messages = [_message(item, f"message {number}") for number, item in enumerate(value, 1)]
    last = messages[-1]
    if last["role"] in ("system", "developer"):
        raise CellError(f"the conversation ends with a message of the {last['role']}, so there is nothing to answer")
    if last["role"] != "tool" and not last.get("content", "").strip():
        raise CellError(f"message {len(messages)}, the last, is empty")
    return messages


def _message(value: Any, where: str) -> Message:
    # Tables write null into fields that only other messages have.
    fields = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
    role = fields.get("role")
    if type(role) is not str:
        raise CellError(f"{where}: a chat message must have the texts role and content, not {shown(value)}")
    if role not in ROLES:
        near = nearest(role.lower(), ROLES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise CellError(f"{where} has the unknown role {role[:40]!r}; expected one of {', '.join(ROLES)}{hint}")
    if "content" in fields:
        return {**_extras(fields), "role": role, "content": _content(fields["content"], where)}
    if role == "assistant" and isinstance(fields.get("tool_calls"), list) and fields["tool_calls"]:
        return {**_extras(fields), "role": role}
    raise CellError(f"{where}, of the {role}, has no content")


def _extras(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): json_value(value) for key, value in fields.items()}


def _content(content: Any, where: str) -> str:
    if type(content) is str:
        return content
    if not isinstance(content, list):
        raise CellError(f"{where}: content must be a text or a list of text parts, not {shown(content)}")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    fields = part if isinstance(part, Mapping) else {}
    kind, text = fields.get("type"), fields.get("text")
    if kind == "text" and type(text) is str:
        return text
    what = f"of type {shown(kind).removeprefix('text ')}" if kind and kind != "text" else f"that is {shown(part)}"
    raise CellError(f'{where} has a part {what}; models are given text alone: {{"type": "text", "text": "…"}}')
