"""Files with one JSON object a line."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tailrace.config.prompts import JsonlSource
from tailrace.errors import PromptError, one_line, quoted
from tailrace.prompts.sources.base import Row, table_rows
from tailrace.prompts.sources.cells import Written

MAX_LINE_BYTES = 2**26
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_OTHER_MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16", b"\x1f\x8b": "gzip", b"PAR1": "Parquet"}
"""The first bytes of files of other kinds."""


def jsonl_rows(config: JsonlSource, key: str) -> Iterator[Row]:
    """The objects of a file; blank lines are skipped. Ids are `name:line`, from 1.

    Numbers keep the text that they have in the file. `key`: the key of the source in the recipe.

    Raises:
        PromptError: there is no such file, or a line is not a JSON object.
    """
    return table_rows(_records(Path(config.path), key), config, key)


def _records(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # some editors begin a file with it
                    _check_mark(line, path)
                if line.strip():
                    yield f"{path.name}:{number}", _record(line, f"{path}, line {number},")
    except OSError as error:
        raise PromptError(f"cannot read {key}.path {path}: {error.strerror}") from None


def _check_mark(line: bytes, path: Path) -> None:
    for mark, kind in _OTHER_MARKS.items():
        if line.startswith(mark):
            raise PromptError(f"{path} is {kind}, not JSON objects in UTF-8, one a line; convert it")


def _record(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise PromptError(f"{where} has more than {MAX_LINE_BYTES // 2**20} MiB; a line holds one JSON object")
    try:
        record = json.loads(
            line.decode(), parse_int=Written, parse_float=Written, parse_constant=_refuse, object_pairs_hook=_object
        )
        if _SURROGATE.search(line):
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise PromptError(f"{where} has {half}, half of a character; write the character itself") from None
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not UTF-8: {line[error.start : error.start + 1]!r} at byte {error.start}"
        ) from None
    except RecursionError:
        raise PromptError(f"{where} is nested too deep") from None
    except ValueError as error:
        why = one_line(error)
        if isinstance(error, json.JSONDecodeError):  # its own text counts lines, of which this is one
            why = f"{error.msg} at its character {error.pos + 1}"
        raise PromptError(f"{where} is not a JSON object, such as {_EXAMPLE}: {why}") from None
    if not isinstance(record, dict):
        array = "; a file of one JSON array has to be written as one object a line" if line.lstrip()[:1] == b"[" else ""
        raise PromptError(f"{where} is not a JSON object, such as {_EXAMPLE}{array}")
    return record


_EXAMPLE = '{"prompt": "…"}'


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has {quoted(twice, 60)} twice")
    return record


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON; a missing value is null")
