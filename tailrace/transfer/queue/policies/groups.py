"""The policy `whole_groups`. A group is whole when every row that the task has still to consume is ready."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tailrace.errors import QueueError
from tailrace.transfer.queue.policies.base import Policy, RowMeta, at_least_one


@dataclass(slots=True, eq=False)
class Group:
    """The rows of a group that one task has still to consume."""

    id: int
    window: int
    remaining: int
    """The number of rows not consumed yet, in any state."""
    ready: list[RowMeta] = field(default_factory=list)
    arrival: int | None = None
    """The group's number in the order of becoming whole for the first time. A returned group keeps its place."""
    cost: int = 0
    """The cost of its ready rows, set when the group becomes whole."""

    @property
    def whole(self) -> bool:
        """Whether every row that the task has still to consume is ready. A whole group stays so until it is taken."""
        return len(self.ready) == self.remaining


class GroupLine:
    """The groups of one task, in the order in which they are handed out.

    Without a window, that is the order in which they became whole. With a window, the run is cut into windows of so
    many consecutive values of `order`. The groups of a window come in the order in which they became whole. A window
    holds back all later ones until its last group was handed out, including lost groups that will come again. A window
    of 1 is strictly in order.
    """

    def __init__(self, *, window: int | None, cost: Callable[[Sequence[RowMeta]], int]) -> None:
        self._window = window
        self._cost = cost
        self._groups: dict[int, Group] = {}
        self._lost: dict[int, int] = {}
        """The lost groups, each with its window. A group comes again to its window, perhaps with fewer rows."""
        self._heap: list[tuple[int, int, int, Group]] = []
        """A heap of the whole groups, by window, arrival and id."""
        self._arrivals = count()
        self._open: dict[int, set[int]] = {}
        """The ids of groups that are not handed out, by window. A window is removed with its last group."""
        self._windows: list[int] = []
        """A heap of the windows in `_open`, and of some that were removed from it."""
        self._whole: Counter[int] = Counter()
        """The number of groups in `_heap`, by window."""
        self._newest = -1
        """The last window of which groups were handed out."""
        self.whole_rows = 0
        self.whole_cost = 0

    def added(self, rows: Sequence[RowMeta], *, leased: bool) -> None:
        """Add a group with these rows to consume. `leased`: the group was handed out before."""
        group_id = rows[0].group_id
        window = self._lost.pop(group_id, None)
        if window is None:
            window = self.window_of(min(row.order for row in rows))
        group = self._groups[group_id] = Group(id=group_id, window=window, remaining=len(rows))
        if leased:
            self._newest = max(self._newest, window)
            self._close(group)
        else:
            self._reopen(group)

    def window_of(self, order: int) -> int:
        """The window that a row of this `order` is in."""
        return 0 if self._window is None else order // self._window

    def begun(self, order: int) -> None:
        """Note that rows of the window of this `order` have been consumed."""
        self._newest = max(self._newest, self.window_of(order))

    def ready(self, row: RowMeta) -> None:
        """Add a ready row to its group."""
        group = self._groups[row.group_id]
        group.ready.append(row)
        self._reopen(group)
        self._update(group)

    def consumed(self, row: RowMeta) -> None:
        """Discount a consumed row of its group."""
        group = self._groups[row.group_id]
        group.remaining -= 1
        if group.remaining == 0:
            del self._groups[group.id]
        elif group.ready:
            self._update(group)

    def lost(self, group_id: int) -> None:
        """Remove a lost group, which will come again."""
        group = self._groups.pop(group_id)
        if group.ready and group.whole:
            self.whole_rows -= len(group.ready)
            self.whole_cost -= group.cost
            self._whole[group.window] -= 1
        self._heap = [entry for entry in self._heap if entry[-1] is not group]
        heapq.heapify(self._heap)
        self._lost[group_id] = group.window
        self._reopen(group)

    @property
    def window(self) -> int | None:
        """The first window with groups that are not handed out; None where there are none."""
        while self._windows and self._windows[0] not in self._open:
            heapq.heappop(self._windows)
        return self._windows[0] if self._windows else None

    @property
    def window_is_whole(self) -> bool:
        """Whether all groups of `window` that are not handed out are whole."""
        window = self.window
        return window is not None and self._whole[window] == len(self._open[window])

    @property
    def window_was_begun(self) -> bool:
        """Whether groups of `window` were handed out before. Then all of its groups have entered, and what is left of
        it has come back, or again."""
        window = self.window
        return window is not None and window <= self._newest

    def first(self) -> Group | None:
        """The next group to hand out; None where it is not whole yet."""
        if not self._heap or self._heap[0][0] != self.window:
            return None
        return self._heap[0][-1]

    def pop(self) -> Group:
        """Remove `first()` from the line."""
        group = heapq.heappop(self._heap)[-1]
        self._whole[group.window] -= 1
        self._close(group)
        return group

    def put_back(self, groups: Sequence[Group]) -> None:
        """Undo the `pop` of these groups."""
        for group in groups:
            self._reopen(group)
            self._push(group)

    def take(self, group: Group) -> list[RowMeta]:
        """Hand out the rows of a popped group, by `order`."""
        rows = sorted(group.ready, key=lambda row: row.order)
        group.ready.clear()
        self._newest = max(self._newest, group.window)
        self.whole_rows -= len(rows)
        self.whole_cost -= group.cost
        return rows

    def _update(self, group: Group) -> None:
        if not group.whole:
            return
        group.cost = self._cost(group.ready)
        group.arrival = next(self._arrivals) if group.arrival is None else group.arrival
        self.whole_rows += len(group.ready)
        self.whole_cost += group.cost
        self._push(group)

    def _push(self, group: Group) -> None:
        assert group.arrival is not None
        self._whole[group.window] += 1
        heapq.heappush(self._heap, (group.window, group.arrival, group.id, group))

    def _reopen(self, group: Group) -> None:
        """Let `group` hold back later windows."""
        if group.window not in self._open:
            self._open[group.window] = set()
            heapq.heappush(self._windows, group.window)
        self._open[group.window].add(group.id)

    def _close(self, group: Group) -> None:
        """Stop `group` from holding back later windows."""
        own = self._open.get(group.window)
        if own is not None:
            own.discard(group.id)
            if not own:
                del self._open[group.window], self._whole[group.window]


class GroupPolicy(Policy):
    """The base class of policies that hand out groups from a GroupLine."""

    def __init__(self, line: GroupLine) -> None:
        self._line = line

    def window_of(self, order: int) -> int:
        """See `Policy.window_of`."""
        return self._line.window_of(order)

    def added(self, rows: Sequence[RowMeta], *, leased: bool = False) -> None:
        """See `Policy.added`."""
        self._line.added(rows, leased=leased)

    def begun(self, order: int) -> None:
        """See `Policy.begun`."""
        self._line.begun(order)

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
    """Hands out up to `max_groups` whole groups, in the order in which they became whole."""

    name = "whole_groups"

    def __init__(self, max_groups: int) -> None:
        super().__init__(GroupLine(window=None, cost=len))
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
    """Whether `amount` is over `bound`; None is no bound."""
    return bound is not None and amount > bound


def check_fits(group: Group, limit: int | None) -> None:
    """Check that a claim of `limit` rows has room for `group`.

    Raises:
        QueueError: it has no room.
    """
    if exceeds(len(group.ready), limit):
        raise QueueError(
            f"group {group.id} has {len(group.ready)} rows, but the claim's limit is {limit}; "
            f"a limit must leave room for a whole group"
        )
