"""Whole groups: every row of a group that a task has still to consume is ready."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tailrace.errors import QueueError
from tailrace.transfer.queue.policies.base import Policy, RowMeta, at_least_one


@dataclass(slots=True, eq=False)
class Group:
    """The rows of a group that one task has still to consume."""

    id: int
    order: int
    remaining: int
    """Rows not consumed yet, in whatever state."""
    ready: list[RowMeta] = field(default_factory=list)
    queued: bool = False
    """Whether it stands in the line."""
    arrival: int | None = None
    """When it first became whole; a group that is given back returns to its place."""
    cost: int = 0
    """Of its ready rows, set when it becomes whole."""

    @property
    def whole(self) -> bool:
        """Every row that the task has still to consume is ready. A whole group stays so until it is taken."""
        return len(self.ready) == self.remaining


class GroupLine:
    """Groups of one task in the order in which they are handed out.

    By arrival, only whole groups stand in it. In order, every group with a row that is neither leased nor consumed
    does, and the first bars the others until it is whole.
    """

    def __init__(self, *, in_order: bool, cost: Callable[[Sequence[RowMeta]], int]) -> None:
        self._in_order = in_order
        self._cost = cost
        self._groups: dict[int, Group] = {}
        self._heap: list[tuple[int, int, Group]] = []
        self._arrivals = count()
        self.whole_rows = 0
        self.whole_cost = 0

    def added(self, rows: Sequence[RowMeta], *, leased: bool) -> None:
        """A group with these rows to consume; `leased`: it was handed out before."""
        group = Group(id=rows[0].group_id, order=min(row.order for row in rows), remaining=len(rows))
        self._groups[group.id] = group
        if self._in_order and not leased:
            self._push(group)

    def ready(self, row: RowMeta) -> None:
        """One more row of its group is ready."""
        group = self._groups[row.group_id]
        group.ready.append(row)
        self._update(group)

    def consumed(self, row: RowMeta) -> None:
        """One row less to wait for."""
        group = self._groups[row.group_id]
        group.remaining -= 1
        if group.remaining == 0:
            del self._groups[group.id]
        elif group.ready:
            self._update(group)

    def lost(self, group_id: int) -> None:
        """A group is gone."""
        group = self._groups.pop(group_id)
        if group.ready and group.whole:
            self.whole_rows -= len(group.ready)
            self.whole_cost -= group.cost
        self._heap = [entry for entry in self._heap if entry[2] is not group]
        heapq.heapify(self._heap)

    def first(self) -> Group | None:
        """The next group to hand out, if it is whole."""
        return self._heap[0][2] if self._heap and self._heap[0][2].whole else None

    def pop(self) -> Group:
        """Remove `first()` from the line."""
        group = heapq.heappop(self._heap)[2]
        group.queued = False
        return group

    def put_back(self, groups: Sequence[Group]) -> None:
        """Undo `pop`."""
        for group in groups:
            self._push(group)

    def take(self, group: Group) -> list[RowMeta]:
        """Hand out the rows of a popped group, by `order`."""
        rows = sorted(group.ready, key=lambda row: row.order)
        group.ready.clear()
        self.whole_rows -= len(rows)
        self.whole_cost -= group.cost
        return rows

    def _update(self, group: Group) -> None:
        if group.whole:
            group.cost = self._cost(group.ready)
            group.arrival = next(self._arrivals) if group.arrival is None else group.arrival
            self.whole_rows += len(group.ready)
            self.whole_cost += group.cost
        if not group.queued and (group.whole or self._in_order):
            self._push(group)

    def _push(self, group: Group) -> None:
        group.queued = True
        key = group.order if self._in_order else group.arrival
        assert key is not None
        heapq.heappush(self._heap, (key, group.id, group))


class GroupPolicy(Policy):
    """Hands out groups from a line of them."""

    def __init__(self, line: GroupLine) -> None:
        self._line = line

    def added(self, rows: Sequence[RowMeta], *, leased: bool = False) -> None:
        """See `Policy.added`."""
        self._line.added(rows, leased=leased)

    def ready(self, row: RowMeta) -> None:
        """See `Policy.ready`."""
        self._line.ready(row)

    def consumed(self, row: RowMeta) -> None:
        """See `Policy.consumed`."""
        self._line.consumed(row)

    def lost(self, rows: Sequence[RowMeta]) -> None:
        """See `Policy.lost`."""
        self._line.lost(rows[0].group_id)


class WholeGroups(GroupPolicy):
    """Up to `max_groups` groups all of whose rows are ready, in the order in which they became so."""

    name = "whole_groups"

    def __init__(self, max_groups: int) -> None:
        super().__init__(GroupLine(in_order=False, cost=len))
        self._max_groups = at_least_one("whole_groups.max_groups", max_groups)

    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        """See `Policy.take`."""
        self.check_rank(rank)
        rows: list[RowMeta] = []
        for _ in range(self._max_groups):
            group = self._line.first()
            if group is None or (rows and exceeds(len(rows) + len(group.ready), limit)):
                break
            check_fits(group, limit)
            rows += self._line.take(self._line.pop())
        return rows


def exceeds(amount: int, bound: int | None) -> bool:
    """Whether `amount` is over `bound`; None bounds nothing."""
    return bound is not None and amount > bound


def check_fits(group: Group, limit: int | None) -> None:
    """Whether a claim of `limit` rows has room for `group`.

    Raises:
        QueueError: it has not.
    """
    if exceeds(len(group.ready), limit):
        raise QueueError(
            f"group {group.id} has {len(group.ready)} rows, but the claim's limit is {limit}; "
            f"a limit must leave room for a whole group"
        )
