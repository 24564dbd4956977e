"""The interface of prompt sources: a source is a function that yields rows."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tailrace.config.patterns import find
from tailrace.config.prompts import ColumnsConfig
from tailrace.errors import PromptError, did_you_mean
from tailrace.prompts.sources.cells import (
    CellError,
    NarrowFloats,
    answer_text,
    column_names,
    find_cell,
    json_value,
    shown,
)
from tailrace.prompts.sources.messages import Message, conversation

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem, as it stands in its source."""

    prompt_id: str
    """The problem's place in the source; unique there, and stable."""
    prompt: str | list[Message]
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """A JSON value."""
    tokens: int | None = None
    """The number of random tokens that the model reads in place of `prompt`; None presents `prompt`."""


def table_rows(
    records: Iterable[tuple[str, Mapping[str, Any]]],
    columns: ColumnsConfig,
    key: str,
    *,
    narrow: NarrowFloats | None = None,
) -> Iterator[Row]:
    """Yield the rows of a table whose records come with ids. Columns other than prompt and answer become metadata.

    `key`: the key of the source in the recipe, for messages.

    Raises:
        PromptError: a column is missing, a cell has the wrong type, or `answer_pattern` finds nothing in some answers.
            The last is raised at the end, with the number of such answers.
    """
    answers = _Answers(columns, key, narrow or {})
    named = {columns.prompt_column, columns.answer_column}
    for prompt_id, record in records:
        prompt = _cell(record, columns.prompt_column, f"{key}.prompt_column", prompt_id)
        yield Row(
            prompt_id=prompt_id,
            prompt=_read(_as_prompt, prompt, columns.prompt_column, prompt_id),
            answer=answers.read(record, prompt_id),
            metadata={
                name: _read(json_value, cell, name, prompt_id) for name, cell in record.items() if name not in named
            },
        )
    answers.check()


class _Answers:
    """The answers of a table, or the parts of them that `answer_pattern` finds."""

    def __init__(self, columns: ColumnsConfig, key: str, narrow: NarrowFloats) -> None:
        """Read the settings of a table's answers.

        Raises:
            PromptError: there is a pattern, but no column to search.
        """
        if columns.answer_pattern is not None and columns.answer_column is None:
            raise PromptError(f"{key}.answer_pattern needs {key}.answer_column, which is null")
        self._key = key
        self._column = columns.answer_column
        self._text = partial(answer_text, narrow=narrow.get(columns.answer_column or ""))
        self._pattern = re.compile(columns.answer_pattern) if columns.answer_pattern is not None else None
        self._rows = 0
        self._missed: list[str] = []

    def read(self, record: Mapping[str, Any], prompt_id: str) -> str | None:
        """The answer of a record; None if it has none.

        Raises:
            PromptError: the column is missing, or its cell has no text.
        """
        if self._column is None:
            return None
        cell = _cell(record, self._column, f"{self._key}.answer_column", prompt_id)
        text = _read(self._text, cell, self._column, prompt_id)
        return text if self._pattern is None else self._found(self._pattern, text, prompt_id)

    def _found(self, pattern: re.Pattern[str], text: str | None, prompt_id: str) -> str | None:
        self._rows += 1
        answer = find(pattern, text or "", "last")
        if answer is None or not answer.strip():
            self._missed.append(f"{prompt_id}, {shown(text)}")
            return None
        return answer.strip()

    def check(self) -> None:
        """Check that the pattern was found in all answers.

        Raises:
            PromptError: it was not found in some answer.
        """
        if self._missed and self._pattern is not None:
            raise PromptError(
                f"{self._key}.answer_pattern {self._pattern.pattern!r} finds nothing in {len(self._missed)} of "
                f"{self._rows} answers, the first that of {self._missed[0]}; change the pattern, or remove the rows"
            )


def _cell(record: Mapping[str, Any], column: str, setting: str, prompt_id: str) -> Any:
    try:
        return find_cell(record, column)
    except KeyError:
        names = column_names(record)
        null = "; set it to null if there are no answers" if setting.endswith("answer_column") else ""
        raise PromptError(
            f"{prompt_id} has no column {column!r} ({setting}); it has {', '.join(names) or 'none'}"
            f"{did_you_mean(column, names) or null}"
        ) from None


def _read(read: Callable[[Any], T], cell: Any, column: str, prompt_id: str) -> T:
    try:
        return read(cell)
    except CellError as error:
        raise PromptError(f"{prompt_id}, column {column!r}: {error}") from None


def _as_prompt(value: Any) -> str | list[Message]:
    if isinstance(value, list):
        return conversation(value)
    if type(value) is not str:
        raise CellError(f"a prompt must be a text or a list of chat messages, not {shown(value)}")
    if not value.strip():
        raise CellError("the prompt is empty")
    return value
