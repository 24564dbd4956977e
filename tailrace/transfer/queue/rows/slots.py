"""Slots for rows. A freed slot is used again with the next generation, so no two rows have the same id."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from tailrace.transfer.queue.base import RowId

T = TypeVar("T")


class Slots(Generic[T]):
    """The rows of a queue, by id."""

    def __init__(self, generations: Sequence[int] = ()) -> None:
        """Make empty slots. `generations`: for each slot, the generation of its next row."""
        self._rows: list[T | None] = [None] * len(generations)
        self.generations = list(generations)
        """For each slot, the generation of its row; of its next row where it is empty."""
        self._free = dict.fromkeys(reversed(range(len(generations))))
        """The slots that no id is given out for. The last one is used next."""

    def __len__(self) -> int:
        """The number of ids that are given out and not freed."""
        return len(self._rows) - len(self._free)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the rows."""
        return (row for row in self._rows if row is not None)

    def new(self, count: int) -> list[RowId]:
        """Give out ids for `count` new rows."""
        for slot in reversed(range(len(self._rows), len(self._rows) + count - len(self._free))):
            self._rows.append(None)
            self.generations.append(0)
            self._free[slot] = None
        slots = [self._free.popitem()[0] for _ in range(count)]
        return list(map(RowId, slots, map(self.generations.__getitem__, slots)))

    def take(self, row_id: RowId) -> None:
        """Give out a given id, which a row had before, such as when a journal is replayed."""
        for slot in range(len(self._rows), row_id.slot + 1):
            self._rows.append(None)
            self.generations.append(0)
            self._free[slot] = None
        del self._free[row_id.slot]
        self.generations[row_id.slot] = row_id.generation

    def fill(self, row_id: RowId, row: T) -> None:
        """Set the row of an id that was given out."""
        self._rows[row_id.slot] = row

    def free(self, slot: int) -> None:
        """Free a slot whose row has left, or will not come."""
        self._rows[slot] = None
        self.generations[slot] += 1
        self._free[slot] = None

    def has_freed(self, row_id: RowId) -> bool:
        """Whether an id was given out and freed."""
        return 0 <= row_id.slot < len(self._rows) and row_id.generation < self.generations[row_id.slot]

    def find(self, row_id: RowId) -> T | None:
        """The row with this id; None where it has left, or has not come."""
        known = 0 <= row_id.slot < len(self._rows) and self.generations[row_id.slot] == row_id.generation
        return self._rows[row_id.slot] if known else None
