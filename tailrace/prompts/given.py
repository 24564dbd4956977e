"""Prompts that a program gives: `Trainer(recipe, prompts=rows)`. They become a file in the run's directory."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from tailrace.config.base import has_numbers_of_json
from tailrace.config.plain import NotPlainError, plain
from tailrace.config.recipe_text import MAX_DEPTH
from tailrace.errors import PromptError, quoted
from tailrace.prompts.sources.cells import answer_text, find_cell, with_cell
from tailrace.registers import run_files


def prompts_section() -> dict[str, Any]:
    """The section `prompts.source` of a recipe for given prompts."""
    return {"type": "jsonl", "path": f"${{output_dir}}/{run_files.GIVEN_PROMPTS}"}


def written_rows(rows: Iterable[Mapping[str, Any]], answer_column: str | None) -> bytes:
    """Write prompts as lines of JSON.

    NumPy's numbers become Python's. An answer that is a float becomes its shortest decimal, as when a Parquet file is
    read.

    `answer_column`: see `prompts.source`.

    Raises:
        PromptError: there are no prompts, or one is no mapping of texts, finite numbers, lists and the like.
    """
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise PromptError(
            f"prompts is {quoted(rows)}; expected a list of mappings, such as [{{'prompt': …, 'answer': …}}]"
        )
    lines = []
    for number, row in enumerate(rows):
        name = f"prompts[{number}]"
        if not isinstance(row, Mapping):
            raise PromptError(f"{name} is {quoted(row)}; expected a mapping, such as {{'prompt': …}}")
        try:
            record = plain(_of_python(_with_answer(row, answer_column), name), name)
            has_numbers_of_json({name: record})
        except NotPlainError as error:
            raise PromptError(str(error)) from None
        except ValueError as error:
            raise PromptError(f"a row {error}") from None
        lines.append(msgspec.json.encode(record) + b"\n")
    if not lines:
        raise PromptError("prompts is empty; give at least one")
    return b"".join(lines)


def _with_answer(row: Mapping[str, Any], column: str | None) -> Mapping[str, Any]:
    """The row; an answer that is a float becomes a text."""
    try:
        answer = find_cell(row, column) if column is not None else None
    except KeyError:
        return row  # reading the file refuses it
    if not isinstance(answer, float | np.floating) or not np.isfinite(answer):
        return row
    narrow = type(answer) if isinstance(answer, np.floating) else None
    return with_cell(row, str(column), answer_text(float(answer), narrow))


def _of_python(value: Any, name: str, levels: int = MAX_DEPTH + 1) -> Any:
    """Replace NumPy's numbers by Python's.

    Raises:
        NotPlainError: the value is nested too deep, or without an end; the error names the row by `name`.
    """
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not levels:
        raise NotPlainError(f"{name} has more than {MAX_DEPTH} mappings and lists within one another")
    if isinstance(value, Mapping):
        return {key: _of_python(entry, name, levels - 1) for key, entry in value.items()}
    return [_of_python(entry, name, levels - 1) for entry in value]
