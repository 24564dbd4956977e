"""One JSON object a line."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.prompts import JsonlSource
from tailrace.errors import PromptError, one_line
from tailrace.prompts.sources.base import Row, table_rows


def jsonl_rows(config: JsonlSource) -> Iterator[Row]:
    """The objects of a file; blank lines are skipped. Ids are `name:line`, from 1.

    Raises:
        PromptError: no such file, or a line is not a JSON object.
    """
    return table_rows(_records(Path(config.path)), config)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # some editors begin a file with it
                if line.strip():
                    yield f"{path.name}:{number}", _record(line, f"{path}, line {number}")
    except OSError as error:
        raise PromptError(f"cannot read prompts.source.path {path}: {error.strerror}") from None


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        example = '{"prompt": "…"}'
        raise PromptError(f"{where}, is not a JSON object, such as {example}: {one_line(error)}") from None
