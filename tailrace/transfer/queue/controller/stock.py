"""What the units of a queue store, in bytes, and what they need not store any more."""

from collections.abc import Collection, Mapping, Sequence

from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller.small import SmallCells
from tailrace.transfer.queue.controller.units import Units
from tailrace.transfer.queue.storage.base import PartId, first_number


class Stock:
    """The rows that have been admitted, and their bytes."""

    def __init__(self, units: Units, small: SmallCells) -> None:
        """`small`: what is known of their cells."""
        self._units = units
        self._small = small
        self._sizes: dict[RowId, int] = {}
        self._holds: dict[int, str] = {}
        self._last_hold = first_number()
        self._held_back: list[tuple[tuple[int, ...], list[RowId]]] = []
        """Units, and rows that they keep for those who hold."""
        self.nbytes = 0
        """Of all rows, each counted once."""

    def add(self, rows: Sequence[RowId], sizes: Sequence[int], units: Collection[int]) -> None:
        """Rows that are stored by `units` from now on, or that are being written there."""
        total = sum(sizes)
        self._sizes.update(zip(rows, sizes, strict=True))
        self.nbytes += total
        for number in units:
            self._count(number, len(rows), total)

    def grow(self, row: RowId, nbytes: int, units: Collection[int]) -> None:
        """Outputs of a row count."""
        self._sizes[row] += nbytes
        self.nbytes += nbytes
        for number in units:
            self._count(number, 0, nbytes)

    def forsake(self, rows: Sequence[RowId], number: int) -> None:
        """A unit counts no more as having these rows, which others have."""
        for row in rows:
            self._count(number, -1, -self._sizes[row])
        self._units.settle([number], rows=rows)

    def leave(self, rows: Mapping[RowId, Collection[int]]) -> None:
        """Rows that left the queue, with the units that store them."""
        self._small.drop(rows)
        by_units: dict[tuple[int, ...], list[RowId]] = {}
        for row, units in rows.items():
            by_units.setdefault(tuple(units), []).append(row)
        for together, leaving in by_units.items():
            self._discount(leaving, together)
            if self._holds:
                self._held_back.append((together, leaving))
            else:
                self._units.settle(together, rows=leaving)

    def withdraw(self, rows: Sequence[RowId], units: Collection[int]) -> None:
        """Rows of a snapshot that was not restored after all; it may be tried again, with the same ids."""
        self._discount(rows, units)
        self._units.settle(units, parts=[PartId(*row, 0) for row in rows])

    def size(self, row: RowId) -> int:
        """Bytes of a row."""
        return self._sizes[row]

    def hold(self, client: str) -> int:
        """Have units keep what leaves from now on, for a client that reads a snapshot. Returns what to release."""
        self._last_hold += 1
        self._holds[self._last_hold] = client
        return self._last_hold

    def release(self, hold: int) -> None:
        """A snapshot has been read; harmless where its hold is gone."""
        self._holds.pop(hold, None)
        if not self._holds:
            for units, rows in self._held_back:
                self._units.settle(units, rows=rows)
            self._held_back.clear()

    def lose_client(self, client: str) -> None:
        """A client that was reading a snapshot is gone."""
        for hold in [hold for hold, holder in self._holds.items() if holder == client]:
            self.release(hold)

    def _discount(self, rows: Sequence[RowId], units: Collection[int]) -> None:
        total = sum(self._sizes.pop(row) for row in rows)
        self.nbytes -= total
        for number in units:
            self._count(number, -len(rows), -total)

    def _count(self, number: int, rows: int, nbytes: int) -> None:
        unit = self._units.get(number)
        if unit is not None:
            unit.rows += rows
            unit.bytes += nbytes
