"""The encoding of a row's cells in memory, for the queue's processes, shared memory and snapshots.

    one part    cells ──measure──▶ Part ──to_bytes──▶ bytes ──read, with the lengths──▶ cells
    many parts  rows ──measure_rows──▶ Parts, of rows in the same columns ──write_rows──▶ memory ──read_column──▶ cells

There are two paths to the same bytes. The processes of a queue move many parts at once, with arithmetic on arrays. For
a single part that arithmetic costs more than the part, so `LocalQueue` and snapshots take the plain path.

A part holds the cells that one write brought for one row, one after the other, in the order of their columns. Each cell
is padded with zeros to a multiple of 8 bytes. So all cells are aligned where the first one is, parts follow each other
without gaps, and the parts of a row, joined, are a part again. All values are little-endian:

    kind            in memory         length
    INTS            int64             elements
    FLOATS          float32           elements
    INT, FLOAT      int64, float64    1
    TEXT            UTF-8             bytes
    JSON            msgpack           bytes

Kinds and lengths travel beside the memory. Reading trusts neither the lengths nor the memory, since another process
wrote both. Arrays are copied once, into the memory, and read in place.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from tailrace.config.columns import ColumnKind
from tailrace.errors import ColumnError, one_line
from tailrace.types import FloatArray, IntArray, Value

Chunk = bytes | IntArray | FloatArray
"""A cell that is ready to be written: an array as it came, or the encoded bytes of any other value."""


_MAX_WIDTHS = 1024
_FEW_CELLS = 32
"""Up to so many cells are checked one by one, which is quicker than as an array."""


class _Widths(NamedTuple):
    """The lengths that the cells of some columns may have."""

    shortest: IntArray
    """The smallest length of a cell, [columns]."""
    longest: IntArray
    """The largest length of a cell, [columns]."""
    units: IntArray
    """The bytes of each unit of length, [columns]."""
    each: list[tuple[int, int, int]]
    """All three numbers of each column."""


class Part(msgspec.Struct, frozen=True, eq=False):
    """The cells of one write to one row, validated and measured. Its arrays are the caller's, not copies."""

    lengths: dict[str, int]
    """Lengths by column, in the order of the cells: elements of an array, bytes of TEXT and JSON, 1 for a number."""
    nbytes: int
    """The bytes of memory, padding included."""
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of consecutive rows with cells in the same columns; `Part` is the same for one row."""

    columns: tuple[str, ...]
    lengths: IntArray
    """The length of each cell, [rows, columns]; see `Part.lengths`."""
    sizes: Sequence[int]
    """The bytes of each part, padding included."""
    nbytes: int
    """The bytes of all parts."""
    chunks: Sequence[tuple[Chunk, ...]]
    """The cells of each part, by row."""

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.sizes)

    def take(self, places: Sequence[int]) -> "Parts":
        """Return the parts of the rows at these places."""
        index = np.array(places, np.int64)
        sizes = [self.sizes[place] for place in places]
        chunks = [self.chunks[place] for place in places]
        return Parts(self.columns, self.lengths[index], sizes, sum(sizes), chunks)


class Layout(msgspec.Struct, frozen=True):
    """The places of a part's cells in its memory."""

    offsets: dict[str, int]
    """The offset of each cell in bytes from the start of the part, by column."""
    nbytes: int
    """The bytes of the whole part, padding included."""


class PartCodec:
    """Measures and reads the parts of rows with these columns."""

    def __init__(self, kinds: Mapping[str, ColumnKind]) -> None:
        self._formats = {column: _FORMATS[kind] for column, kind in kinds.items()}
        self._widths: dict[tuple[str, ...], _Widths] = {}
        """The widths of the sets of columns seen so far: most parts have the same columns as earlier ones."""

    # One part

    def measure(self, cells: Mapping[str, Value]) -> Part:
        """Validate `cells` and compute the memory that they need. Arrays must be of exactly the column's dtype.

        Raises:
            ColumnError: a column is unknown, or a value is not what its column holds.
        """
        lengths: dict[str, int] = {}
        chunks: list[Chunk] = []
        nbytes = 0
        for column, value in cells.items():
            form = self._formats.get(column) or self._unknown(column)
            [chunk] = form.encode(column, [value])
            length = 1 if form.number else len(chunk)
            lengths[column] = length
            chunks.append(chunk)
            nbytes += (length * form.unit + 7) & -8
        return Part(lengths, nbytes, tuple(chunks))

    def layout(self, lengths: Mapping[str, int]) -> Layout:
        """The layout of a part with these lengths.

        Raises:
            ColumnError: a column is unknown, or no cell of it has that length.
        """
        offsets: dict[str, int] = {}
        end = 0
        for column, length in lengths.items():
            form = self._formats.get(column) or self._unknown(column)
            if length < 0 or (form.number and length != 1):
                expected = "1" if form.number else "0 or more"
                raise ColumnError(f"column {column!r}: got a cell of length {length}, expected {expected}")
            offsets[column] = end
            end = (end + length * form.unit + 7) & -8
        return Layout(offsets, end)

    def read(self, memory: memoryview, lengths: Mapping[str, int], columns: Iterable[str]) -> dict[str, Value]:
        """Read the cells in `columns` from `memory`, which holds one part and nothing else.

        Arrays are read-only views of the memory.

        Raises:
            ColumnError: the part lacks a column, the lengths do not fit the memory, or a cell's bytes are corrupt.
        """
        layout = self.layout(lengths)
        if layout.nbytes != len(memory):
            raise ColumnError(f"the lengths of a part need {layout.nbytes} bytes, the memory has {len(memory)}")
        memory = memory.toreadonly()
        return {column: self._cell(memory, lengths, layout, column) for column in columns}

    def _cell(self, memory: memoryview, lengths: Mapping[str, int], layout: Layout, column: str) -> Value:
        start = layout.offsets.get(column)
        if start is None:
            raise ColumnError(f"column {column!r} is not in the part; it has {sorted(layout.offsets)}")
        form = self._formats[column]
        return self._decode(form, column, memory[start : start + lengths[column] * form.unit])

    # Many parts

    def measure_rows(self, rows: Iterable[Mapping[str, Value]]) -> list[Parts]:
        """Validate and measure `rows`. Consecutive rows with cells in the same columns become one Parts.

        Raises:
            ColumnError: as for `measure`.
        """
        return [self._measure_alike(columns, list(alike)) for columns, alike in groupby(rows, key=tuple)]

    def _measure_alike(self, columns: tuple[str, ...], rows: Sequence[Mapping[str, Value]]) -> Parts:
        if len(rows) == 1:  # many puts are of one row
            part = self.measure(rows[0])
            row = np.array([list(part.lengths.values())], np.int64)
            return Parts(columns, row, [part.nbytes], part.nbytes, [part.chunks])
        lengths = np.empty((len(rows), len(columns)), np.int64)
        chunks: list[Sequence[Chunk]] = []
        for place, column in enumerate(columns):
            form = self._formats.get(column) or self._unknown(column)
            chunks.append(form.encode(column, [cells[column] for cells in rows]))
            lengths[:, place] = 1 if form.number else list(map(len, chunks[place]))
        sizes = self.sizes(columns, lengths)
        by_row = list(zip(*chunks, strict=True)) if columns else [()] * len(rows)
        return Parts(columns, lengths, sizes, sum(sizes), by_row)

    def sizes(self, columns: Sequence[str], lengths: IntArray) -> list[int]:
        """The bytes of n parts with cells in `columns`, padding included, for `lengths` [n, columns].

        Raises:
            ColumnError: as for `cell_sizes`.
        """
        if len(lengths) * max(1, len(columns)) > _FEW_CELLS:
            sizes: list[int] = self.cell_sizes(columns, lengths).sum(axis=1, dtype=np.int64).tolist()
            return sizes
        widths = self._widths.get(tuple(columns)) or self._add_widths(tuple(columns))
        few = []
        for row in lengths.tolist():
            nbytes = 0
            for length, (shortest, longest, unit) in zip(row, widths.each, strict=True):
                if not shortest <= length <= longest:
                    _refuse_lengths(columns, lengths, widths)
                nbytes += (length * unit + 7) & -8
            few.append(nbytes)
        return few

    def cell_sizes(self, columns: Sequence[str], lengths: IntArray) -> IntArray:
        """The bytes of cells with these lengths, [n, columns], padding included: `layout` for many parts at once.

        Raises:
            ColumnError: a column is unknown or named twice, or no cell of it has such a length.
        """
        widths = self._widths.get(tuple(columns)) or self._add_widths(tuple(columns))
        if ((lengths < widths.shortest) | (lengths > widths.longest)).any():
            _refuse_lengths(columns, lengths, widths)
        padded: IntArray = (lengths * widths.units + 7) & -8
        return padded

    def _add_widths(self, columns: tuple[str, ...]) -> _Widths:
        forms = [self._formats.get(column) or self._unknown(column) for column in columns]
        if len(set(columns)) < len(columns):
            raise ColumnError(f"a part has each column once, got {list(columns)}")
        shortest = np.array([int(form.number) for form in forms], np.int64)
        longest = np.where(shortest, 1, _MAX_LENGTH)
        units = np.array([form.unit for form in forms], np.int64)
        each = list(zip(shortest.tolist(), longest.tolist(), units.tolist(), strict=True))
        widths = _Widths(shortest, longest, units, each)
        if len(self._widths) < _MAX_WIDTHS:
            self._widths[columns] = widths
        return widths

    def read_column(
        self, column: str, memories: Sequence[memoryview], places: IntArray, lengths: IntArray
    ) -> list[Value]:
        """Read n cells of one column, each from its own place. Arrays are read-only views of the memory.

        `places` [n, 2]: for each cell, the number of its memory and the byte at which it begins there. `lengths` [n].

        Raises:
            ColumnError: the column is unknown, a cell does not lie in its memory, or its bytes are corrupt.
        """
        form = self._formats.get(column) or self._unknown(column)
        cells = self.find_column(column, memories, places, lengths)
        return [self._decode(form, column, cell) for cell in cells]

    def find_column(
        self, column: str, memories: Sequence[memoryview], places: IntArray, lengths: IntArray
    ) -> list[memoryview]:
        """The memory of each cell that `read_column` would read.

        Raises:
            ColumnError: the column is unknown, or a cell does not lie in its memory.
        """
        form = self._formats.get(column) or self._unknown(column)
        numbers, starts = places[:, 0], places[:, 1]
        sizes = np.array([len(memory) for memory in memories], np.int64)
        if not ((numbers >= 0) & (numbers < len(sizes))).all():
            raise ColumnError(f"column {column!r}: got cells in other memory than the {len(sizes)} pieces that came")
        size = sizes[numbers]
        # starts and lengths are each checked on their own before they are added, so no sum of them overflows
        in_bounds = (starts >= 0) & (starts <= size) & (lengths >= 0) & (lengths <= size)
        if form.number:
            in_bounds &= lengths == 1
        if not (in_bounds & (starts + lengths * form.unit <= size)).all():
            raise ColumnError(f"column {column!r}: got cells that do not lie in the memory that came")
        ends = starts + lengths * form.unit
        where = zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True)
        return [memories[number][start:end] for number, start, end in where]

    def _decode(self, form: "_Format", column: str, memory: memoryview) -> Value:
        try:
            return form.decode(memory)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
            raise ColumnError(f"column {column!r}: its {len(memory)} bytes are corrupt ({one_line(error)})") from None

    def _unknown(self, column: str) -> NoReturn:
        raise ColumnError(f"unknown column {column!r}; known: {sorted(self._formats)}")


def _refuse_lengths(columns: Sequence[str], lengths: IntArray, widths: _Widths) -> NoReturn:
    row, place = np.argwhere((lengths < widths.shortest) | (lengths > widths.longest))[0].tolist()
    expected = "1" if widths.shortest[place] else f"0 to {_MAX_LENGTH}"
    raise ColumnError(f"column {columns[place]!r}: got a cell of length {lengths[row, place]}, expected {expected}")


def write_rows(parts: Sequence[Parts], memory: memoryview) -> None:
    """Write `parts` one after the other to `memory`, which has exactly as many writable bytes as they need."""
    needed = sum(alike.nbytes for alike in parts)
    assert needed == len(memory), f"the parts need {needed} bytes, the memory has {len(memory)}"
    arrays = {dtype.itemsize: np.frombuffer(memory, dtype) for dtype in (_INT64, _FLOAT32)}
    end = 0
    for chunks in chain.from_iterable(alike.chunks for alike in parts):
        for chunk in chunks:
            start = end
            if isinstance(chunk, bytes):
                end = start + len(chunk)
                memory[start:end] = chunk
            else:
                end = start + chunk.nbytes
                width = chunk.itemsize
                arrays[width][start // width : end // width] = chunk
            if padding := -end & 7:
                memory[end : end + padding] = bytes(padding)
                end += padding


def to_bytes(part: Part) -> bytes:
    """Return the bytes that `write_rows` writes for one part."""
    return join_cells(part.chunks)


def join_cells(chunks: Iterable[Chunk]) -> bytes:
    """Return the bytes that `write_rows` writes for these cells. For a few cells this is quicker."""
    pieces: list[bytes | memoryview] = []
    for chunk in chunks:
        piece = memoryview(chunk) if isinstance(chunk, bytes) else np.ascontiguousarray(chunk).data
        pieces += (piece, bytes(-piece.nbytes & 7))
    return b"".join(pieces)


class _Format(msgspec.Struct, frozen=True, kw_only=True):
    """The format of cells of one kind."""

    unit: int
    """The bytes of each unit of length."""
    number: bool = False
    """Whether the length is always 1."""
    encode: Callable[[str, Sequence[Value]], Sequence[Chunk]]
    """Encodes values of a column. Raises ColumnError."""
    decode: Callable[[memoryview], Value]
    """Decodes one cell. Raises ValueError, TypeError, RecursionError or MsgspecError."""


def _wrong(column: str, value: Value, expected: str) -> ColumnError:
    return ColumnError(f"column {column!r}: got {type(value).__name__} {value!r:.80}, expected {expected}")


def _array(dtype: np.dtype[np.int64] | np.dtype[np.float32]) -> _Format:
    def encode(column: str, values: Sequence[Value]) -> Sequence[Chunk]:
        arrays: list[Chunk] = []
        for value in values:
            if not isinstance(value, np.ndarray):
                raise _wrong(column, value, f"a 1-D {dtype.name} array")
            if value.dtype != dtype or value.ndim != 1:
                raise ColumnError(
                    f"column {column!r}: got a {value.dtype} array of shape {value.shape}, "
                    f"expected a 1-D {dtype.name} array; convert it with np.asarray(..., dtype=np.{dtype.name})"
                )
            arrays.append(value)
        return arrays

    return _Format(unit=dtype.itemsize, encode=encode, decode=partial(np.frombuffer, dtype=dtype))


def _each(encode: Callable[[str, Value], bytes]) -> Callable[[str, Sequence[Value]], Sequence[Chunk]]:
    return lambda column, values: [encode(column, value) for value in values]


def _encode_int(column: str, value: Value) -> bytes:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise _wrong(column, value, "int of 64 bits, signed")
    return _INT.pack(value)


def _encode_float(column: str, value: Value) -> bytes:
    if not isinstance(value, float):
        raise _wrong(column, value, ColumnKind.FLOAT)
    return _FLOAT.pack(value)


def _encode_text(column: str, value: Value) -> bytes:
    if not isinstance(value, str):
        raise _wrong(column, value, ColumnKind.TEXT)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ColumnError(f"column {column!r}: text that is not valid Unicode ({error})") from None


def _encode_json(column: str, value: Value) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        kind = type(value).__name__  # not the value: a value that is nested too deeply cannot be printed either
        raise ColumnError(f"column {column!r}: got {kind}, expected {ColumnKind.JSON}: {error}") from None


def _decode_json(memory: memoryview) -> Value:
    data = bytes(memory)  # a copy, which no other process can change between the two passes
    # Decoding allocates as many elements as an array claims to have. Skipping allocates none and finds false claims.
    msgspec.msgpack.decode(data, type=msgspec.Raw)
    value: Value = msgspec.msgpack.decode(data)
    return value


_MAX_LENGTH = 2**40
"""The largest length of a cell that `sizes` accepts, so that no sum overflows."""
_INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")
_INT, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
_FORMATS: Mapping[ColumnKind, _Format] = {
    ColumnKind.INTS: _array(_INT64),
    ColumnKind.FLOATS: _array(_FLOAT32),
    ColumnKind.INT: _Format(
        unit=8, number=True, encode=_each(_encode_int), decode=lambda memory: _INT.unpack(memory)[0]
    ),
    ColumnKind.FLOAT: _Format(
        unit=8, number=True, encode=_each(_encode_float), decode=lambda memory: _FLOAT.unpack(memory)[0]
    ),
    ColumnKind.TEXT: _Format(unit=1, encode=_each(_encode_text), decode=lambda memory: str(memory, "utf-8")),
    ColumnKind.JSON: _Format(unit=1, encode=_each(_encode_json), decode=_decode_json),
}
