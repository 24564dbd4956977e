"""Prompts that a program gives: `Trainer(recipe, prompts=rows)`. They become a file in the run's directory."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tailrace.config.base import has_numbers_of_json
from tailrace.config.plain import NotPlainError, plain
from tailrace.errors import PromptError, quoted

FILE = "given/prompts.jsonl"
"""In the run's directory."""


def prompts_section() -> dict[str, Any]:
    """The section `prompts.source` of a recipe for them."""
    return {"type": "jsonl", "path": f"${{output_dir}}/{FILE}"}


def written_rows(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Prompts as lines of JSON.

    Raises:
        PromptError: there are none, or one is no mapping of texts, numbers, lists and the like.
    """
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise PromptError(
            f"prompts is {quoted(rows)}; expected a list of mappings, such as [{{'prompt': …, 'answer': …}}]"
        )
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise PromptError(f"prompts[{number}] is {quoted(row)}; expected a mapping, such as {{'prompt': …}}")
        try:
            lines.append(msgspec.json.encode(has_numbers_of_json(plain(row))) + b"\n")
        except (NotPlainError, ValueError) as error:
            raise PromptError(f"prompts[{number}]: {error}") from None
    if not lines:
        raise PromptError("prompts is empty; give at least one")
    return b"".join(lines)
