"""Where rows stand: slots that are used again, each time with the next generation, so that no two rows have one id."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from tailrace.transfer.queue.base import RowId

T = TypeVar("T")


class Slots(Generic[T]):
    """Rows by id."""

    def __init__(self, generations: Sequence[int] = ()) -> None:
        """`generations`: by slot, of the row in it or, where it is empty, of its next one. All are empty."""
        self._rows: list[T | None] = [None] * len(generations)
        self.generations = list(generations)
        """See above."""
        self._free = dict.fromkeys(reversed(range(len(generations))))
        """Those that no id was given out for; the last one is next."""

    def __len__(self) -> int:
        """Ids that were given out and not freed."""
        return len(self._rows) - len(self._free)

    def __iter__(self) -> Iterator[T]:
        """The rows."""
        return (row for row in self._rows if row is not None)

    def new(self, count: int) -> list[RowId]:
        """Ids for so many rows to come."""
        for slot in reversed(range(len(self._rows), len(self._rows) + count - len(self._free))):
            self._rows.append(None)
            self.generations.append(0)
            self._free[slot] = None
        slots = [self._free.popitem()[0] for _ in range(count)]
        return list(map(RowId, slots, map(self.generations.__getitem__, slots)))

    def take(self, row_id: RowId) -> None:
        """Give out an id that was given out before, when a journal is replayed."""
        for slot in range(len(self._rows), row_id.slot + 1):
            self._rows.append(None)
            self.generations.append(0)
            self._free[slot] = None
        del self._free[row_id.slot]
        self.generations[row_id.slot] = row_id.generation

    def fill(self, row_id: RowId, row: T) -> None:
        """The row of an id that was given out."""
        self._rows[row_id.slot] = row

    def free(self, slot: int) -> None:
        """The row of this slot has left, or will not come."""
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
