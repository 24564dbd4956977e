"""The cells of the rows, in memory, with exact byte accounting.

A cell is validated and encoded when it is written and decoded when it is read: arrays and JSON values are kept as
bytes, so neither the producer that wrote a cell nor a consumer that read it can change what is stored, and a snapshot
needs no conversion. Reading an array copies nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tailrace.errors import ColumnError
from tailrace.transfer.queue.base import RowId
from tailrace.types import ColumnKind, Value, WeightVersion

Stored = bytes | int | float | str
"""A cell as it is kept."""

_DTYPES: Mapping[ColumnKind, type[np.generic]] = {ColumnKind.INTS: np.int64, ColumnKind.FLOATS: np.float32}
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Validated cells of one row, ready to be written."""

    values: dict[str, Stored]
    lengths: dict[str, int]
    """Elements of each array, 1 for other cells."""
    version: WeightVersion | None
    """The smallest entry of `weight_versions`; None where that is not among the cells, or empty."""
    nbytes: int


class DataPlane:
    """Cells by row id. Arrays must be numpy arrays of exactly the column's dtype; a bool is not an int."""

    def __init__(self, columns: Mapping[str, ColumnKind]) -> None:
        self._columns = dict(columns)
        self._rows: dict[RowId, dict[str, Stored]] = {}
        self._row_bytes: dict[RowId, int] = {}
        self.nbytes = 0
        """Bytes of all cells: arrays and text (UTF-8) by their length, numbers as 8, JSON values as msgpack."""

    def freeze(self, cells: Mapping[str, Value]) -> Cells:
        """Validate and encode `cells`; stores nothing.

        Raises:
            ColumnError: a column is unknown, or a value is not what its column holds.
        """
        values: dict[str, Stored] = {}
        lengths: dict[str, int] = {}
        for column, value in cells.items():
            kind = self._columns.get(column)
            if kind is None:
                raise ColumnError(f"unknown column {column!r}; known: {sorted(self._columns)}")
            values[column] = _encode(column, kind, value)
            lengths[column] = len(value) if isinstance(value, np.ndarray) else 1
        nbytes = sum(map(_size, values.values()))
        return Cells(values=values, lengths=lengths, version=_oldest_version(cells), nbytes=nbytes)

    def write(self, row: RowId, cells: Cells) -> None:
        """Add `cells` to a row, new or known; each column is written once."""
        stored = self._rows.setdefault(row, {})
        assert stored.keys().isdisjoint(cells.values), f"{row} has some of {sorted(cells.values)} already"
        stored.update(cells.values)
        self._row_bytes[row] = self._row_bytes.get(row, 0) + cells.nbytes
        self.nbytes += cells.nbytes

    def read(self, row: RowId, columns: Iterable[str]) -> dict[str, Value]:
        """The cells of `row` in `columns`; arrays are read-only views."""
        stored = self._rows[row]
        return {column: _decode(self._columns[column], stored[column]) for column in columns}

    def drop(self, row: RowId) -> None:
        """Forget a row and free its bytes."""
        del self._rows[row]
        self.nbytes -= self._row_bytes.pop(row)

    def stored(self, row: RowId) -> Mapping[str, Stored]:
        """The cells of `row` as they are kept."""
        return self._rows[row]

    def adopt(self, stored: Mapping[str, Any]) -> Cells:
        """Validate cells that `stored` returned, of a queue with the same columns.

        Raises:
            ColumnError: they are not such cells.
        """
        try:
            cells = {column: _decode(self._columns[column], value) for column, value in stored.items()}
        except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ColumnError(f"cells {sorted(stored)} are corrupt: {error}") from None
        return self.freeze(cells)


def _oldest_version(cells: Mapping[str, Value]) -> WeightVersion | None:
    versions = cells.get("weight_versions")
    return int(versions.min()) if isinstance(versions, np.ndarray) and versions.size else None


def _encode(column: str, kind: ColumnKind, value: Value) -> Stored:
    match kind:
        case ColumnKind.INTS | ColumnKind.FLOATS:
            return _encode_array(column, kind, value)
        case ColumnKind.INT if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64:
            return int(value)
        case ColumnKind.FLOAT if isinstance(value, float):
            return float(value)
        case ColumnKind.TEXT if isinstance(value, str):
            return _encode_text(column, value)
        case ColumnKind.JSON:
            return _encode_json(column, value)
    expected = "int of 64 bits" if kind is ColumnKind.INT else kind.value
    raise ColumnError(f"column {column!r}: got {type(value).__name__} {value!r:.80}, expected {expected}")


def _encode_array(column: str, kind: ColumnKind, value: Value) -> bytes:
    dtype = _DTYPES[kind]
    if not isinstance(value, np.ndarray):
        raise ColumnError(f"column {column!r}: got {type(value).__name__} {value!r:.80}, expected a 1-D {kind}")
    if value.dtype != dtype or value.ndim != 1:
        raise ColumnError(
            f"column {column!r}: got a {value.dtype} array of shape {value.shape}, expected a 1-D {kind}; "
            f"convert it with np.asarray(..., dtype=np.{dtype.__name__})"
        )
    return value.tobytes()


def _encode_text(column: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ColumnError(f"column {column!r}: text that is not valid Unicode ({error})") from None
    return str.__str__(value)  # members of a StrEnum become plain strings


def _encode_json(column: str, value: Value) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ColumnError(f"column {column!r}: got {value!r:.80}, expected {ColumnKind.JSON}: {error}") from None


def _decode(kind: ColumnKind, stored: Any) -> Value:
    if kind in _DTYPES:
        return np.frombuffer(stored, dtype=_DTYPES[kind])
    if kind is ColumnKind.JSON:
        value: Value = msgspec.msgpack.decode(stored)
        return value
    return stored  # type: ignore[no-any-return]


def _size(stored: Stored) -> int:
    if isinstance(stored, bytes):
        return len(stored)
    return len(stored.encode()) if isinstance(stored, str) else _NUMBER_BYTES
