"""Cells of tables: their places, their texts and their JSON values."""

import math
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from tailrace.config.base import INTEGERS
from tailrace.config.recipe_text import MAX_DEPTH, in_yaml
from tailrace.errors import quoted

_COLUMNS_SHOWN = 40

NarrowFloats = Mapping[str, type[np.floating[Any]]]
"""Numpy's types of columns whose floats have less than 64 bits, by dotted path. Python's float hides their decimals."""


class Written(str):
    """A number as the source has written it."""

    __slots__ = ()


class CellError(ValueError):
    """A cell is not of the kind that is needed; the text says of what kind it is."""


def find_cell(record: Mapping[str, Any], column: str) -> Any:
    """The cell of a column, or of a field in it by dotted path. A column whose own name has dots comes first.

    Raises:
        KeyError: there is none.
    """
    if column in record:
        return record[column]
    for place, character in enumerate(column):
        inside = record.get(column[:place]) if character == "." else None
        if isinstance(inside, Mapping):
            try:
                return find_cell(inside, column[place + 1 :])
            except KeyError:
                continue
    raise KeyError(column)


def with_cell(record: Mapping[str, Any], column: str, cell: Any) -> dict[str, Any]:
    """A copy of `record` with another cell where `find_cell` finds one.

    Raises:
        KeyError: there is none.
    """
    if column in record:
        return {**record, column: cell}
    for place, character in enumerate(column):
        inside = record.get(column[:place]) if character == "." else None
        if isinstance(inside, Mapping):
            try:
                return {**record, column[:place]: with_cell(inside, column[place + 1 :], cell)}
            except KeyError:
                continue
    raise KeyError(column)


def column_names(record: Mapping[str, Any]) -> list[str]:
    """The columns, and their fields as dotted paths; no more than a message can show."""
    return [path for path, _ in zip(_paths(record, "", MAX_DEPTH), range(_COLUMNS_SHOWN), strict=False)]


def _paths(record: Mapping[str, Any], prefix: str, levels: int) -> Iterator[str]:
    for name, value in record.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and levels:
            yield from _paths(value, f"{prefix}{name}.", levels - 1)


def answer_text(value: Any, narrow: type[np.floating[Any]] | None = None) -> str | None:
    """An answer as text. A number is as the source has written it, else the shortest decimal that reads as the same.

    None for a missing answer: null, or a float that is no number. `narrow`: see `NarrowFloats`.

    Raises:
        CellError: the value has no text.
    """
    match value:
        case None:
            return None
        case str():
            return str(value)
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _decimal_text(value, narrow or np.float64)
        case Decimal() if value.is_finite():
            text = f"{value:f}"
            return text.rstrip("0").rstrip(".") if "." in text else text
        case date() | datetime() | time():
            return value.isoformat()
    raise CellError(
        f"an answer must be a text, a number, a truth value or a date, not {shown(value)}; graders find what else "
        "there is in metadata, with answer_column: null"
    )


def _decimal_text(value: float, kind: type[np.floating[Any]]) -> str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise CellError(f"an answer must be a finite number, not {value}")
    return np.format_float_positional(kind(value), trim="-")


def json_value(value: Any) -> Any:
    """A cell as a JSON value; a float that is no number is null.

    Raises:
        CellError: no JSON value can hold the cell's value.
    """
    try:
        return _plain(msgspec.to_builtins(value, str_keys=True, builtin_types=(Written,)), MAX_DEPTH)
    except RecursionError:
        raise CellError(f"is nested more than {MAX_DEPTH} levels deep") from None
    except (TypeError, msgspec.MsgspecError):
        raise CellError(f"holds {shown(value)}, which cannot be kept as JSON; drop the column") from None


def _plain(value: Any, levels: int) -> Any:
    if not levels:
        raise CellError(f"is nested more than {MAX_DEPTH} levels deep")
    match value:
        case dict():
            return {key: _plain(entry, levels - 1) for key, entry in value.items()}
        case list():
            return [_plain(entry, levels - 1) for entry in value]
        case Written():
            return _number(value)
        case float():
            return _finite(value, str(value))
    return value


def _number(text: Written) -> int | float | None:
    if set(text) & set(".eE"):
        return _finite(float(text), text)
    number = int(text) if len(text) <= 20 else 2**64
    if number not in INTEGERS:
        raise CellError(f"holds {quoted(str(text), 40)}, which takes more than 64 bits; write it as a text")
    return number


def _finite(number: float, text: str) -> float | None:
    if math.isinf(number):
        raise CellError(f"holds {quoted(str(text), 40)}, which is no finite number; write it as a text")
    return None if math.isnan(number) else number


def shown(value: Any) -> str:
    """A value of a source as a message shows it, with its kind. A value that JSON lacks has Python's type name."""
    match value:
        case Written():
            return f"number {quoted(str(value), 60)[1:-1]}"
        case None | bool():
            return in_yaml(value)
        case str():
            kind = "text"
        case int() | float():
            kind = "number"
        case list():
            kind = "list"
        case Mapping():
            kind = "mapping"
        case _:
            kind = type(value).__name__
    return f"{kind} {in_yaml(value, 60)}"
