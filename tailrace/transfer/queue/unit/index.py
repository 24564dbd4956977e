"""An index of a unit's cells: the cells of each part, and where in the part each of them lies.

    part ──address──▶ table of all parts with the same columns, and the place in it ──▶ lengths of its cells

Each part has one dict entry, and the rest is in arrays. So a batch is looked up at once, no matter which writes its
rows came from.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import ColumnError
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.storage.addresses import join, split
from tailrace.transfer.queue.storage.base import PartBatch, PartId, part_ids, stale
from tailrace.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """The locations of the cells of a read. The arrays are [n, columns]."""

    parts: list[PartId]
    """The parts in which the cells lie."""
    part: IntArray
    """The place of each cell's part in `parts`."""
    offsets: IntArray
    """Bytes from the start of the part."""
    lengths: IntArray
    """See `Run.lengths`."""
    sizes: IntArray
    """Bytes of each cell, padding included."""


class PartIndex:
    """The unit's parts by row, and the lengths of their cells."""

    def __init__(self) -> None:
        self._addresses: dict[PartId, int] = {}
        """The address of each part: the number of its table, and its place there."""
        self._rows: dict[tuple[int, int], list[PartId]] = {}
        self._tables: list[_Table] = []
        self._by_columns: dict[tuple[str, ...], int] = {}
        """The number of the table for each list of columns."""

    def add(self, batch: PartBatch) -> None:
        """Add the parts of a batch. A part that is known already stays as it is."""
        parts, lengths = batch.parts, batch.lengths
        new = [place for place, part in enumerate(parts) if part not in self._addresses]
        if not new:
            return
        columns = tuple(batch.columns)
        number = self._by_columns.setdefault(columns, len(self._tables))
        if number == len(self._tables):
            self._tables.append(_Table(columns))
        places = self._tables[number].add(lengths if len(new) == len(parts) else lengths[new])
        for place, where in zip(new, places, strict=True):
            part = parts[place]
            self._addresses[part] = join(number, where)
            self._rows.setdefault(part[:2], []).append(part)

    def drop(self, parts: Iterable[PartId]) -> None:
        """Forget parts. Unknown ones are ignored."""
        for part in parts:
            address = self._addresses.pop(part, None)
            if address is None:
                continue
            number, place = split(address)
            self._tables[number].free.append(place)
            of_row = self._rows[part[:2]]
            of_row.remove(part)
            if not of_row:
                del self._rows[part[:2]]

    def of_row(self, slot: int, generation: int) -> Sequence[PartId]:
        """Return all parts of a row."""
        return tuple(self._rows.get((slot, generation), ()))

    def batches(self, codec: PartCodec, parts: Sequence[PartId]) -> list[PartBatch]:
        """Return `parts` in batches, each of one tag and with cells in the same columns.

        Raises:
            StaleRowError: a part is not stored (any more).
        """
        numbers, lines = split(self._addresses_of(parts))
        alike: dict[tuple[int, int], list[int]] = {}
        for place, (part, number) in enumerate(zip(parts, numbers.tolist(), strict=True)):
            alike.setdefault((part.tag, number), []).append(place)
        batches = []
        for (_, number), places in alike.items():
            table = self._tables[number]
            lengths = table.lengths[lines[places]]
            together = [parts[place] for place in places]
            batches.append(PartBatch(together, table.columns, lengths, codec.sizes(table.columns, lengths)))
        return batches

    def locate(self, codec: PartCodec, rows: IntArray, columns: Sequence[str], tags: IntArray) -> Located:
        """Locate the cells of `rows [n, 2]` in `columns` that were written under `tags [n, columns]`.

        Raises:
            StaleRowError: a part is not stored (any more).
            ColumnError: a part has no cell in one of the columns.
        """
        parts: list[PartId] = []
        part, offsets, lengths, sizes = (np.empty((len(rows), len(columns)), np.int64) for _ in range(4))
        for together in _equal_columns(tags):
            wanted = part_ids(rows, tags[:, together[0]].tolist())
            part[:, together] = np.arange(len(parts), len(parts) + len(rows))[:, None]
            parts += wanted
            numbers, lines = split(self._addresses_of(wanted))
            for number in np.unique(numbers).tolist():
                table = self._tables[number]
                among = np.flatnonzero(numbers == number)
                all_lengths = table.lengths[lines[among]]
                all_sizes = codec.cell_sizes(table.columns, all_lengths)
                places = [table.place(columns[column], wanted[among[0]]) for column in together]
                where = (among[:, None], np.array(together))
                lengths[where] = all_lengths[:, places]
                sizes[where] = all_sizes[:, places]
                offsets[where] = (np.cumsum(all_sizes, axis=1) - all_sizes)[:, places]
        return Located(parts, part, offsets, lengths, sizes)

    def _addresses_of(self, parts: Sequence[PartId]) -> IntArray:
        try:
            return np.fromiter(map(self._addresses.__getitem__, parts), np.int64, len(parts))
        except KeyError as error:
            raise stale(error.args[0]) from None


class _Table:
    """The lengths of the cells of parts with the same columns, [places, columns]."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self.lengths = np.zeros((0, len(columns)), np.int64)
        self.free: list[int] = []
        """The places without a part."""

    def add(self, lengths: IntArray) -> list[int]:
        """Add the lengths [n, columns] of n parts. Return their places."""
        known, missing = len(self.lengths), len(lengths) - len(self.free)
        if missing > 0:
            grown = max(missing, known)
            self.lengths = np.concatenate([self.lengths, np.zeros((grown, len(self.columns)), np.int64)])
            self.free += range(known, known + grown)
        rest = len(self.free) - len(lengths)
        places = self.free[rest:]
        del self.free[rest:]
        self.lengths[places] = lengths
        return places

    def place(self, column: str, part: PartId) -> int:
        """Return the place of `column` among the table's columns. `part`: named in the error.

        Raises:
            ColumnError: the table's parts have no cell in that column.
        """
        if column not in self.columns:
            raise ColumnError(f"{part} has no cell in column {column!r}; it has {sorted(self.columns)}")
        return self.columns.index(column)


def _equal_columns(tags: IntArray) -> Iterator[list[int]]:
    """Group the columns of `tags [n, columns]` whose values are equal."""
    groups: dict[bytes, list[int]] = {}
    for column in range(tags.shape[1]):
        groups.setdefault(tags[:, column].tobytes(), []).append(column)
    return iter(groups.values())
