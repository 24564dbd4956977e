"""The policy `first_in`: single rows, in the order of the run."""

import heapq
from collections.abc import Callable, Sequence

from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies.base import Policy, RowMeta, at_least_one


class RowPolicy(Policy):
    """Hands out up to `max_rows` ready rows, the smallest `key` first, as soon as one is ready."""

    def __init__(self, max_rows: int, *, key: Callable[[RowMeta], tuple[int, ...]]) -> None:
        self._max_rows = at_least_one(f"{self.name}.max_rows", max_rows)
        self._key = key
        self._heap: list[tuple[tuple[int, ...], RowId, RowMeta]] = []

    def added(self, rows: Sequence[RowMeta], *, leased: bool = False) -> None:
        """Do nothing: rows count once they are ready."""

    def ready(self, row: RowMeta) -> None:
        """See `Policy.ready`."""
        heapq.heappush(self._heap, (self._key(row), row.id, row))

    def consumed(self, row: RowMeta) -> None:
        """Do nothing: `take` has removed the row."""

    def lost(self, rows: Sequence[RowMeta]) -> None:
        """See `Policy.lost`."""
        ids = {row.id for row in rows}
        self._heap = [entry for entry in self._heap if entry[1] not in ids]
        heapq.heapify(self._heap)

    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        """See `Policy.take`."""
        self.check_rank(rank)
        rows = min(len(self._heap), self._max_rows if limit is None else min(limit, self._max_rows))
        return [heapq.heappop(self._heap)[2] for _ in range(rows)]


class FirstIn(RowPolicy):
    """Hands out up to `max_rows` ready rows, the smallest `order` first, as soon as one is ready."""

    name = "first_in"

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, key=lambda row: (row.order,))
