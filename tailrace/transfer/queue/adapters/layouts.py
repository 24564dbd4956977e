"""The layouts of a column of arrays, for a batch of rows: pure functions over arrays.

    rows ──listed──▶ list of arrays ──pack──▶ values, offsets ──nest──▶ torch.nested
                        │      ▲                    │
                        │      └───unpack, unpad────┤
                        └──pad──▶ values [B, T], lengths

B is the number of rows. T is the number of elements of the longest row (padded), or of all rows together (packed).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tailrace.errors import ColumnError
from tailrace.transfer.queue.base import Row
from tailrace.types import IntArray

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
"""1-D, int64 or float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Arrays one after the other."""

    values: Array
    """[T]"""
    offsets: IntArray
    """[B + 1], the start of each array; the last entry is T."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Padded:
    """Arrays filled up to one length."""

    values: Array
    """[B, T]"""
    lengths: IntArray
    """[B], elements without the padding."""
    side: Literal["left", "right"]
    """The side of the padding."""


def listed(rows: Sequence[Row], column: str) -> list[Array]:
    """Return the arrays of `column`, in the order of `rows`.

    Raises:
        ColumnError: a row lacks the column, or it does not hold arrays.
    """
    arrays = []
    for row in rows:
        cell = row.cells.get(column)
        if not isinstance(cell, np.ndarray):
            raise ColumnError(
                f"column {column!r} of {row.id}: got {type(cell).__name__} {cell!r:.80}, expected an array"
            )
        arrays.append(cell)
    return arrays


def pack(arrays: Sequence[Array]) -> Packed:
    """Copy arrays one after the other.

    Raises:
        ColumnError: no arrays, or arrays of several dtypes.
    """
    _dtype(arrays)
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(_lengths(arrays), out=offsets[1:])
    return Packed(values=np.concatenate(arrays), offsets=offsets)


def unpack(packed: Packed) -> list[Array]:
    """Return the arrays of `packed`, as views."""
    bounds = packed.offsets.tolist()
    return [packed.values[start:end] for start, end in pairwise(bounds)]


def pad(arrays: Sequence[Array], *, value: float, side: Literal["left", "right"] = "right") -> Padded:
    """Copy arrays, filled up with `value` on one side to the length of the longest.

    Raises:
        ColumnError: no arrays, arrays of several dtypes, or a `value` that the arrays cannot hold.
    """
    dtype, lengths = _dtype(arrays), _lengths(arrays)
    check_padding(value, dtype)
    width = int(lengths.max())
    values = np.full((len(arrays), width), value, dtype)
    for row, array in zip(values, arrays, strict=True):
        row[slice(len(array)) if side == "right" else slice(width - len(array), width)] = array
    return Padded(values=values, lengths=lengths, side=side)


def check_padding(value: float, dtype: np.dtype[Any]) -> None:
    """Check that arrays of `dtype` can be filled up with `value`.

    Raises:
        ColumnError: such arrays cannot hold it.
    """
    if dtype.kind == "i" and not (isinstance(value, int) and -(2**63) <= value < 2**63):
        raise ColumnError(f"{dtype} arrays cannot be padded with {value!r}; pass an int of 64 bits")
    if not isinstance(value, int | float):
        raise ColumnError(f"{dtype} arrays cannot be padded with {value!r:.80}; pass a float")


def unpad(padded: Padded) -> list[Array]:
    """Return the arrays of `padded`, as views."""
    width = padded.values.shape[1]
    pairs = zip(padded.values, padded.lengths.tolist(), strict=True)
    if padded.side == "right":
        return [row[:length] for row, length in pairs]
    return [row[width - length :] for row, length in pairs]


def nest(packed: Packed) -> "torch.Tensor":
    """Return a jagged nested tensor [B, *] that shares the memory of `packed`. Read-only arrays are copied."""
    import torch

    values, offsets = (
        torch.from_numpy(array if array.flags.writeable else array.copy()) for array in (packed.values, packed.offsets)
    )
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return the common dtype of all arrays."""
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) != 1:
        raise ColumnError(f"got {len(arrays)} arrays of dtypes {sorted(map(str, dtypes))}, expected some of one dtype")
    return dtypes.pop()


def _lengths(arrays: Sequence[Array]) -> IntArray:
    """Return the length of each array, [B]."""
    return np.fromiter(map(len, arrays), np.int64, len(arrays))
