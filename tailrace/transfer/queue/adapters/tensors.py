"""Conversions between the cells of rows and torch tensors: the columns of a batch, and outputs.

    rows ──make_batch──▶ TensorBatch: one value for each column ── a model ──▶ columns of tensors ──make_cells──▶ cells

    kind            column of B rows                                              accepted by make_cells besides
    INTS, FLOATS    PackedTensor, PaddedTensor or a nested tensor: its Layout     a sequence of tensors or arrays [T]
    INT, FLOAT      int64, float64 tensor [B]                                     a sequence of numbers
    TEXT, JSON      list

Tensors are copies: they do not depend on the queue's memory.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, assert_never

import numpy as np
import torch

from tailrace.config.columns import ColumnKind
from tailrace.errors import ColumnError, did_you_mean
from tailrace.transfer.queue.adapters import layouts as arrays
from tailrace.transfer.queue.adapters.layouts import Array, listed, nest, pack, unpack, unpad
from tailrace.transfer.queue.base import Claim, Row, RowId
from tailrace.types import Value


@dataclass(frozen=True, slots=True)
class Pad:
    """The layout of arrays filled up to the length of the longest."""

    value: float
    """The value of the padding; an int for arrays of ints."""
    side: Literal["left", "right"] = "right"


Layout: TypeAlias = Literal["packed", "nested"] | Pad
"""The layout of a column of arrays: one after the other, a nested tensor (jagged), or filled up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTensor:
    """Arrays one after the other."""

    values: torch.Tensor
    """[T], int64 or float32."""
    offsets: torch.Tensor
    """[B + 1], int64: the start of each array; the last entry is T."""

    def split(self) -> list[torch.Tensor]:
        """Return the B arrays, as views."""
        return list(self.values.tensor_split(self.offsets[1:-1].cpu()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedTensor:
    """Arrays filled up to one length."""

    values: torch.Tensor
    """[B, T], int64 or float32."""
    lengths: torch.Tensor
    """[B], int64: elements without the padding."""
    side: Literal["left", "right"]
    """The side of the padding."""


Column: TypeAlias = torch.Tensor | PackedTensor | PaddedTensor | Sequence[Any]
"""The cells of B rows in one column."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorBatch:
    """The rows of a claim, column by column."""

    claim: Claim
    """The claim to ack or nack; its rows have no cells."""
    columns: Mapping[str, Column]
    """The columns that the task reads, in the order of the claim's rows."""


def check_layouts(
    layouts: Mapping[str, Layout], columns: Collection[str], kinds: Mapping[str, ColumnKind], *, task: str
) -> None:
    """Check that each of `layouts` is a valid layout for a column of arrays among `columns`, which `task` reads.

    Raises:
        ColumnError: a layout is not valid, or its column is not read or holds no arrays.
    """
    for column, layout in layouts.items():
        if column not in columns:
            raise ColumnError(
                f"a layout for column {column!r}, which task {task!r} does not read; it reads {sorted(columns)}"
                f"{did_you_mean(column, columns)}"
            )
        if kinds[column] not in _DTYPES:
            raise ColumnError(f"a layout for column {column!r}, which holds {kinds[column]}; only arrays have one")
        if isinstance(layout, Pad) and layout.side in ("left", "right"):
            dtype = np.int64 if kinds[column] is ColumnKind.INTS else np.float32
            arrays.check_padding(layout.value, np.dtype(dtype))
        elif layout not in ("packed", "nested"):
            raise ColumnError(
                f"a layout {layout!r:.80} for column {column!r}: expected 'packed', 'nested', Pad(value) or "
                f"Pad(value, side='left')"
            )


def make_batch(claim: Claim, kinds: Mapping[str, ColumnKind], layouts: Mapping[str, Layout]) -> TensorBatch:
    """Return the rows of `claim` as tensors. Columns of arrays without a layout in `layouts` are packed.

    `layouts`: see `check_layouts`.

    Raises:
        ColumnError: a column cannot hold its padding value.
    """
    rows = claim.rows
    columns = {column: _column(rows, column, kinds[column], layouts.get(column, "packed")) for column in rows[0].cells}
    bare = replace(claim, rows=tuple(replace(row, cells={}) for row in rows))
    return TensorBatch(claim=bare, columns=columns)


def make_outputs(
    claim: Claim, columns: Mapping[str, Column], kinds: Mapping[str, ColumnKind]
) -> dict[RowId, dict[str, Value]]:
    """Make the outputs for `TransferQueue.ack` from columns with a cell for every row of `claim`, in their order.

    Raises:
        ColumnError: see `make_cells`.
    """
    cells = make_cells(columns, kinds, rows=len(claim.rows))
    return {row.id: own for row, own in zip(claim.rows, cells, strict=True)}


def make_cells(
    columns: Mapping[str, Column], kinds: Mapping[str, ColumnKind], *, rows: int | None = None
) -> list[dict[str, Value]]:
    """Make the cells of rows from columns with one cell for each row. Tensors may be on any device.

    `rows`: the number of rows; by default the number of cells in the first column.

    Raises:
        ColumnError: the queue does not have a column, or a column has another number of cells or another dtype.
    """
    by_column = {}
    for column, values in columns.items():
        if column not in kinds:
            raise ColumnError(f"no column {column!r} in the queue{did_you_mean(column, kinds)}")
        cells = by_column[column] = _cells(column, values, kinds[column])
        rows = len(cells) if rows is None else rows
        if len(cells) != rows:
            raise ColumnError(f"column {column!r}: got {len(cells)} cells, expected one for each of {rows} rows")
    return [{column: cells[place] for column, cells in by_column.items()} for place in range(rows or 0)]


def _column(rows: Sequence[Row], column: str, kind: ColumnKind, layout: Layout) -> Column:
    match kind:
        case ColumnKind.INTS | ColumnKind.FLOATS:
            return _laid_out(listed(rows, column), layout)
        case ColumnKind.INT | ColumnKind.FLOAT:
            dtype = torch.int64 if kind is ColumnKind.INT else torch.float64
            return torch.tensor([row.cells[column] for row in rows], dtype=dtype)
        case _:
            return [row.cells[column] for row in rows]


def _laid_out(cells: Sequence[Array], layout: Layout) -> Column:
    match layout:
        case Pad(value=value, side=side):
            padded = arrays.pad(cells, value=value, side=side)
            return PaddedTensor(
                values=torch.from_numpy(padded.values), lengths=torch.from_numpy(padded.lengths), side=side
            )
        case "nested":
            return nest(pack(cells))
        case "packed":
            packed = pack(cells)
            return PackedTensor(values=torch.from_numpy(packed.values), offsets=torch.from_numpy(packed.offsets))
        case _:
            assert_never(layout)


def _cells(column: str, values: Column, kind: ColumnKind) -> Sequence[Value]:
    """Return the cells of a column, one for each row."""
    if isinstance(values, torch.Tensor) and values.ndim == 0:
        raise ColumnError(f"column {column!r}: got a tensor without dimensions, expected one cell for each row")
    if kind in _DTYPES:
        return _arrays(column, values, _DTYPES[kind])
    if isinstance(values, PackedTensor | PaddedTensor):
        raise ColumnError(f"column {column!r}: got {type(values).__name__}, expected a sequence: it holds {kind}")
    if isinstance(values, torch.Tensor):
        numbers: list[Value] = values.tolist()
        return numbers
    return values


def _arrays(column: str, values: Column, dtype: torch.dtype) -> Sequence[Value]:
    match values:
        case PackedTensor():
            packed = arrays.Packed(
                values=_array(column, values.values, dtype), offsets=_array(column, values.offsets, torch.int64)
            )
            return unpack(packed)
        case PaddedTensor():
            padded = arrays.Padded(
                values=_array(column, values.values, dtype),
                lengths=_array(column, values.lengths, torch.int64),
                side=values.side,
            )
            return unpad(padded)
        case torch.Tensor():
            return [_array(column, cell, dtype) for cell in values.unbind()]
        case _:
            return [_array(column, cell, dtype) if isinstance(cell, torch.Tensor) else cell for cell in values]


def _array(column: str, tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    if tensor.dtype != dtype:
        raise ColumnError(f"column {column!r}: got a tensor of {tensor.dtype}; convert it with .to({dtype})")
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array


_DTYPES = {ColumnKind.INTS: torch.int64, ColumnKind.FLOATS: torch.float32}
"""The dtype of arrays, by the kind of their column."""
