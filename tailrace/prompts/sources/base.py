"""The seam of prompt sources: a source is a function that yields rows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tailrace.config.prompts import ColumnsConfig
from tailrace.errors import PromptError, did_you_mean

Message = dict[str, Any]
"""A chat message: at least `role` and `content`, both strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem as its source has it."""

    prompt_id: str
    """Says where it came from; unique in the source and stable."""
    prompt: str | list[Message]
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """A JSON value."""


def table_rows(records: Iterable[tuple[str, Mapping[str, Any]]], columns: ColumnsConfig) -> Iterator[Row]:
    """Rows of a table whose records come with their ids. Columns that are neither prompt nor answer become metadata.

    Raises:
        PromptError: a column is missing, or a cell has the wrong type.
    """
    named = {columns.prompt_column, columns.answer_column}
    for prompt_id, record in records:
        answer = None
        if columns.answer_column is not None:
            cell = _cell(record, columns.answer_column, "answer_column", prompt_id)
            answer = _as_answer(cell, f"{prompt_id}, column {columns.answer_column!r}")
        prompt = _cell(record, columns.prompt_column, "prompt_column", prompt_id)
        yield Row(
            prompt_id=prompt_id,
            prompt=_as_prompt(prompt, f"{prompt_id}, column {columns.prompt_column!r}"),
            answer=answer,
            metadata={name: _as_json(value, prompt_id, name) for name, value in record.items() if name not in named},
        )


def _cell(record: Mapping[str, Any], column: str, setting: str, prompt_id: str) -> Any:
    if column not in record:
        null = "; set it to null if there are no answers" if setting == "answer_column" else ""
        raise PromptError(
            f"{prompt_id} has no column {column!r} (prompts.source.{setting}); it has {', '.join(record) or 'none'}"
            f"{did_you_mean(column, record) or null}"
        )
    return record[column]


def _as_answer(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise PromptError(f"{where}: an answer must be a string or a number, not {_shown(value)}")


def _as_prompt(value: Any, where: str) -> str | list[Message]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        return [_as_message(item, where) for item in value]
    if value in ("", []) or isinstance(value, str):
        raise PromptError(f"{where}: the prompt is empty")
    raise PromptError(f"{where}: a prompt must be a string or a list of chat messages, not {_shown(value)}")


def _as_message(value: Any, where: str) -> Message:
    # Tables write null into the fields of a message that others have.
    fields = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
    if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
        raise PromptError(f"{where}: a chat message must have the strings role and content, not {_shown(value)}")
    return fields


def _as_json(value: Any, prompt_id: str, column: str) -> Any:
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except TypeError:
        raise PromptError(
            f"{prompt_id}, column {column!r}, holds {_shown(value)}, which cannot be kept as metadata; drop the column"
        ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '…'}"
