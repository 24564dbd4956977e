"""The policy `balanced`: batches that are split among the ranks of a trainer, so that all have equally much to do.

    whole groups ──`rows` rows of them are ready──▶ batch ──partition──▶ a part for each rank ──claim(rank)──▶ leased
                                                                              ▲                                  │
                                                                              └─────────── nack, expiry ─────────┘

Waiting: ranks step together, so a rank that is ahead waits. The next batch is split only when every rank has taken its
part of the present one. Rows that are given back go to another claim of their rank, before its part of a later batch.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import chain

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies.base import RowMeta, at_least_one
from tailrace.transfer.queue.policies.groups import GroupLine, GroupPolicy

Partition = Callable[[Sequence[int], int], Sequence[Sequence[int]]]
"""(costs of items, number of parts) → the items of each part, as places in the costs; each item is in one part."""


class BalancedByLength(GroupPolicy):
    """Gathers whole groups until they have `rows` rows, and splits these into `ranks` parts of nearly equal cost.

    Groups come in the order in which they became whole, and none is skipped: where the next group would exceed `rows`,
    the batch is complete without it. The cost of a row is the number of elements in its `cost_columns`: the tokens that
    a forward pass over prompt and response sees. The rows of a group may go to different ranks.

    A claim names its rank and gets that rank's part by `order`, at most `limit` rows. The rank's next claim gets the
    rest.

    A batch waits until `rows` rows are ready. So let groups fill a batch exactly and put whole batches, or the last
    rows are never handed out. A snapshot does not hold batches, so take it between them: after a restore, rows that
    were not acked join the next batch.
    """

    name = "balanced"

    def __init__(
        self,
        ranks: int,
        rows: int,
        *,
        partition: Partition,
        cost_columns: Sequence[str] = ("prompt_ids", "response_ids"),
    ) -> None:
        """`partition`: a function such as `planning.balance.partition` with `equal_count`.

        Raises:
            QueueError: a number is less than 1, or there are fewer rows than ranks.
        """
        super().__init__(GroupLine(window=None, cost=len))
        self._parts: list[list[tuple[int, int, RowId, RowMeta]]] = [
            [] for _ in range(at_least_one("balanced.ranks", ranks))
        ]
        """The rows that each rank has not taken, by rank: a heap by batch and order."""
        if rows < ranks:
            raise QueueError(f"balanced.rows is {rows}; it must be at least the number of ranks, {ranks}")
        self._rows = rows
        self._partition = partition
        self._cost_columns = tuple(cost_columns)
        self._batches = 0
        self._places: dict[RowId, tuple[int, int]] = {}
        """The batch and the rank of every row that was split and is not consumed yet."""

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Policy.columns`."""
        return self._cost_columns

    @property
    def ranks(self) -> Sequence[int]:
        """See `Policy.ranks`."""
        return range(len(self._parts))

    def ready(self, row: RowMeta) -> None:
        """See `Policy.ready`."""
        if row.id in self._places:
            self._hand_to_rank(row)
        else:
            super().ready(row)

    def consumed(self, row: RowMeta) -> None:
        """See `Policy.consumed`."""
        self._places.pop(row.id, None)  # a row that was leased when the queue was restored has no known batch
        super().consumed(row)

    def lost(self, rows: Sequence[RowMeta]) -> None:
        """See `Policy.lost`. The batch goes on without these rows."""
        ids = {row.id for row in rows}
        for row_id in ids:
            self._places.pop(row_id, None)
        for rank, part in enumerate(self._parts):
            self._parts[rank] = [entry for entry in part if entry[2] not in ids]
            heapq.heapify(self._parts[rank])
        super().lost(rows)

    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        """See `Policy.take`."""
        self.check_rank(rank)
        assert rank is not None, "checked"
        if not any(self._parts):
            self._split(self._gather())
        part = self._parts[rank]
        batch = part[0][0] if part else None
        rows: list[RowMeta] = []
        while part and part[0][0] == batch and len(rows) != limit:
            rows.append(heapq.heappop(part)[-1])
        return rows

    def _gather(self) -> list[RowMeta]:
        """The rows of the next batch; empty while there are not enough."""
        batch: list[RowMeta] = []
        if self._line.whole_rows < self._rows:
            return batch
        while (group := self._line.first()) is not None and len(batch) + len(group.ready) <= self._rows:
            batch += self._line.take(self._line.pop())
        if not batch:
            assert group is not None, "there are whole groups"
            raise QueueError(
                f"group {group.id} has {len(group.ready)} rows, but balanced.rows is {self._rows}; "
                f"a batch must have room for a whole group"
            )
        return batch

    def _split(self, batch: Sequence[RowMeta]) -> None:
        if not batch:
            return
        costs = [sum(row.lengths[column] for column in self._cost_columns) for row in batch]
        parts = self._partition(costs, len(self._parts))
        assert len(parts) == len(self._parts), f"{len(parts)} parts for {len(self._parts)} ranks"
        assert sorted(chain.from_iterable(parts)) == list(range(len(batch))), "every row is in one part"
        for rank, items in enumerate(parts):
            for item in items:
                self._places[batch[item].id] = self._batches, rank
                self._hand_to_rank(batch[item])
        self._batches += 1

    def _hand_to_rank(self, row: RowMeta) -> None:
        batch, rank = self._places[row.id]
        heapq.heappush(self._parts[rank], (batch, row.order, row.id, row))
