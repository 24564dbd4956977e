"""The cells of a local queue's rows, in memory, with exact byte accounting.

    cells ──freeze──▶ Cells: one bytes object ──write──▶ the parts of a row ──read──▶ cells

Each put or ack writes one part for a row. The part is encoded when it is written and decoded when it is read, see
`cells`. So neither the producer that wrote a cell nor a consumer that read it can change the stored cell, and a
snapshot needs no conversion. Reading an array copies nothing.
"""

from collections.abc import Collection, Mapping

from tailrace.config.columns import ColumnKind
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec, to_bytes
from tailrace.transfer.queue.policies.base import CellFacts
from tailrace.transfer.queue.rows.schema import oldest_version
from tailrace.types import Value


class Cells(CellFacts, frozen=True, kw_only=True):
    """The validated cells of one write to one row: an encoded part, and the facts about it."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """The bytes of memory, padding included."""
        return len(self.data)


class DataPlane:
    """Cells by row id. Arrays must be numpy arrays of exactly the column's dtype; a bool is not an int."""

    def __init__(self, columns: Mapping[str, ColumnKind]) -> None:
        self._codec = PartCodec(columns)
        self._rows: dict[RowId, list[Cells]] = {}
        self.nbytes = 0
        """The bytes of all parts."""

    def freeze(self, cells: Mapping[str, Value]) -> Cells:
        """Validate and encode `cells`. This stores nothing.

        Raises:
            ColumnError: a column is unknown, or a value is not what its column holds.
        """
        part = self._codec.measure(cells)
        return Cells(data=to_bytes(part), lengths=part.lengths, version=oldest_version(cells))

    def write(self, row: RowId, cells: Cells) -> None:
        """Add `cells` to a row, which may be new; each column is written once."""
        parts = self._rows.setdefault(row, [])
        for part in parts:
            assert part.lengths.keys().isdisjoint(cells.lengths), f"{row} has some of {sorted(cells.lengths)} already"
        parts.append(cells)
        self.nbytes += cells.nbytes

    def read(self, row: RowId, columns: Collection[str]) -> dict[str, Value]:
        """The cells of `row` in `columns`; arrays are read-only views."""
        cells: dict[str, Value] = {}
        for part in self._rows[row]:
            wanted = [column for column in columns if column in part.lengths]
            cells |= self._codec.read(memoryview(part.data), part.lengths, wanted)
        return {column: cells[column] for column in columns}

    def drop(self, row: RowId) -> None:
        """Forget a row and free its bytes."""
        self.nbytes -= sum(part.nbytes for part in self._rows.pop(row))

    def stored(self, row: RowId) -> bytes:
        """All cells of `row`, in the order in which they were written, as one part."""
        return b"".join(part.data for part in self._rows[row])

    def store(self, row: RowId, data: bytes, facts: CellFacts) -> None:
        """Add a row from the `stored` bytes of another data plane with the same columns."""
        self.write(row, Cells(data=data, lengths=facts.lengths, version=facts.version))
