"""The seam of prompt sources: a source is a function that yields rows."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tailrace.config.prompts import ColumnsConfig
from tailrace.errors import PromptError, did_you_mean
from tailrace.patterns import find

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
        PromptError: a column is missing, a cell has the wrong type, or `answer_pattern` finds nothing in some answers:
            that is raised at the end, with their number.
    """
    named = {columns.prompt_column, columns.answer_column}
    found = _FoundAnswers(columns)
    for prompt_id, record in records:
        answer = None
        if columns.answer_column is not None:
            cell = _cell(record, columns.answer_column, "answer_column", prompt_id)
            answer = found.find(_as_answer(cell, f"{prompt_id}, column {columns.answer_column!r}"), prompt_id)
        prompt = _cell(record, columns.prompt_column, "prompt_column", prompt_id)
        yield Row(
            prompt_id=prompt_id,
            prompt=_as_prompt(prompt, f"{prompt_id}, column {columns.prompt_column!r}"),
            answer=answer,
            metadata={name: _as_json(value, prompt_id, name) for name, value in record.items() if name not in named},
        )
    found.check()


class _FoundAnswers:
    """What `answer_pattern` finds in the answers of a table."""

    def __init__(self, columns: ColumnsConfig) -> None:
        """
        Raises:
            PromptError: there is a pattern, and no column to look into.
        """
        if columns.answer_pattern is not None and columns.answer_column is None:
            raise PromptError("prompts.source.answer_pattern needs prompts.source.answer_column, which is null")
        self._pattern = re.compile(columns.answer_pattern) if columns.answer_pattern is not None else None
        self._rows = 0
        self._missed: list[str] = []

    def find(self, cell: str | None, prompt_id: str) -> str | None:
        """The answer in `cell`, which is the cell itself where there is no pattern."""
        self._rows += 1
        if self._pattern is None:
            return cell
        answer = find(self._pattern, cell or "", "last")
        if answer is None or not answer.strip():
            self._missed.append(f"{prompt_id}, {_shown(cell)}")
            return None
        return answer.strip()

    def check(self) -> None:
        """
        Raises:
            PromptError: the pattern has found nothing in some answer.
        """
        if self._missed and self._pattern is not None:
            raise PromptError(
                f"prompts.source.answer_pattern {self._pattern.pattern!r} finds nothing in {len(self._missed)} of "
                f"{self._rows} answers, the first that of {self._missed[0]}; change the pattern, or remove the rows"
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
