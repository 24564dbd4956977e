"""Which ready rows a task is handed next.

Each task of a queue owns one policy, which keeps its own index of the rows that are ready: the control plane tells it
of every change, and `take` removes what it chooses, so choosing never looks at rows that are not chosen. Choosing and
leasing are one step: a policy that gathers (a token budget) leaves its rows where they are until a whole claim is
there, so that two consumers can never hold halves of what each other needs.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMeta:
    """What a policy sees of a row."""

    id: RowId
    group_id: int
    order: int
    lengths: dict[str, int]
    """Elements of each array written so far, 1 for other cells; grows as columns are written."""


class Policy(ABC):
    """Chooses among the ready rows of one task. Only `take` may raise."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns whose lengths the policy looks at; its task must read them."""
        return ()

    @abstractmethod
    def added(self, rows: Sequence[RowMeta]) -> None:
        """A group came: its rows that the task has still to consume; none is ready yet."""

    @abstractmethod
    def ready(self, row: RowMeta) -> None:
        """All inputs of `row` are written, or its lease ended without an ack."""

    @abstractmethod
    def consumed(self, row: RowMeta) -> None:
        """`row`, taken before, was acked."""

    @abstractmethod
    def take(self, limit: int | None) -> list[RowMeta]:
        """Remove and return the ready rows of the next claim, `limit` at the most; [] says wait for more.

        Raises:
            QueueError: `limit` can never be met; nothing was removed.
        """


class FirstIn(Policy):
    """Up to `max_rows` ready rows, smallest `order` first, as soon as there is one."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = _at_least_one("FirstIn.max_rows", max_rows)
        self._heap: list[tuple[int, RowId, RowMeta]] = []

    def added(self, rows: Sequence[RowMeta]) -> None:
        """Nothing to do: rows count once they are ready."""

    def ready(self, row: RowMeta) -> None:
        """See `Policy.ready`."""
        heapq.heappush(self._heap, (row.order, row.id, row))

    def consumed(self, row: RowMeta) -> None:
        """Nothing to do: `take` has removed it."""

    def take(self, limit: int | None) -> list[RowMeta]:
        """See `Policy.take`."""
        rows = min(len(self._heap), self._max_rows if limit is None else min(limit, self._max_rows))
        return [heapq.heappop(self._heap)[2] for _ in range(rows)]


class _GroupPolicy(Policy):
    """Hands out groups from a line of them."""

    def __init__(self, line: "_GroupLine") -> None:
        self._line = line

    def added(self, rows: Sequence[RowMeta]) -> None:
        """See `Policy.added`."""
        self._line.added(rows)

    def ready(self, row: RowMeta) -> None:
        """See `Policy.ready`."""
        self._line.ready(row)

    def consumed(self, row: RowMeta) -> None:
        """See `Policy.consumed`."""
        self._line.consumed(row)


class WholeGroups(_GroupPolicy):
    """Up to `max_groups` groups all of whose rows are ready, in the order in which they became so."""

    def __init__(self, max_groups: int) -> None:
        super().__init__(_GroupLine(in_order=False, cost=len))
        self._max_groups = _at_least_one("WholeGroups.max_groups", max_groups)

    def take(self, limit: int | None) -> list[RowMeta]:
        """See `Policy.take`."""
        rows: list[RowMeta] = []
        for _ in range(self._max_groups):
            group = self._line.first()
            if group is None or (rows and _exceeds(len(rows) + len(group.ready), limit)):
                break
            _check_fits(group, limit)
            rows += self._line.take(self._line.pop())
        return rows


class TokenBudget(_GroupPolicy):
    """Whole groups gathered until the next one would exceed `tokens`, or the rows reach the caller's limit.

    The next-fit rule by which micro-batches are packed: groups are added one after the other, none is skipped, and a
    claim is complete when it holds `limit` rows, when its cost reaches `tokens`, or when the group after it is whole
    and does not fit. Until then it waits. A single group over the budget is handed out alone. A group costs its prompt
    once and each of its responses: at least one token, so nothing is waited for once the budget is used up.

    Groups come in the order in which they became whole, or, `in_order`, strictly by `order` among all groups that the
    task has neither leased nor consumed: a slow group is waited for. `tokens=None` has no budget and gathers `limit`
    rows whatever their size: with `in_order`, the next mini-batch of a synchronous run.
    """

    def __init__(
        self,
        tokens: int | None,
        *,
        in_order: bool,
        prompt_column: str = "prompt_ids",
        response_column: str = "response_ids",
    ) -> None:
        super().__init__(_GroupLine(in_order=in_order, cost=len if tokens is None else self._cost))
        self._tokens = None if tokens is None else _at_least_one("TokenBudget.tokens", tokens)
        self._prompt_column = prompt_column
        self._response_column = response_column

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Policy.columns`."""
        return () if self._tokens is None else (self._prompt_column, self._response_column)

    def take(self, limit: int | None) -> list[RowMeta]:
        """See `Policy.take`."""
        if self._tokens is None and limit is None:
            raise QueueError("a claim without a token budget needs a limit: pass the rows that it is to gather")
        if not self._reaches(self._line.whole_cost, self._line.whole_rows, limit):
            return []
        groups, complete = self._gather(limit)
        if not complete:
            self._line.put_back(groups)
            return []
        return [row for group in groups for row in self._line.take(group)]

    def _gather(self, limit: int | None) -> tuple[list["_Group"], bool]:
        """Pop groups until the claim is complete or the next group is not whole; and which of the two it was."""
        groups: list[_Group] = []
        rows = cost = 0
        while (group := self._line.first()) is not None:
            if not groups:
                _check_fits(group, limit)
            elif _exceeds(rows + len(group.ready), limit) or _exceeds(cost + group.cost, self._tokens):
                return groups, True
            groups.append(self._line.pop())
            rows += len(group.ready)
            cost += group.cost
            if self._reaches(cost, rows, limit):
                return groups, True
        return groups, False

    def _reaches(self, cost: int, rows: int, limit: int | None) -> bool:
        return (self._tokens is not None and cost >= self._tokens) or (limit is not None and rows >= limit)

    def _cost(self, rows: Sequence[RowMeta]) -> int:
        responses = sum(row.lengths[self._response_column] for row in rows)
        return rows[0].lengths[self._prompt_column] + responses


@dataclass(slots=True, eq=False)
class _Group:
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


class _GroupLine:
    """Groups of one task in the order in which they are handed out.

    By arrival, only whole groups stand in it. In order, every group with a row that is neither leased nor consumed
    does, and the first bars the others until it is whole.
    """

    def __init__(self, *, in_order: bool, cost: Callable[[Sequence[RowMeta]], int]) -> None:
        self._in_order = in_order
        self._cost = cost
        self._groups: dict[int, _Group] = {}
        self._heap: list[tuple[int, int, _Group]] = []
        self._arrivals = count()
        self.whole_rows = 0
        self.whole_cost = 0

    def added(self, rows: Sequence[RowMeta]) -> None:
        """A group with these rows to consume."""
        group = _Group(id=rows[0].group_id, order=min(row.order for row in rows), remaining=len(rows))
        self._groups[group.id] = group
        if self._in_order:
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

    def first(self) -> _Group | None:
        """The next group to hand out, if it is whole."""
        return self._heap[0][2] if self._heap and self._heap[0][2].whole else None

    def pop(self) -> _Group:
        """Remove `first()` from the line."""
        group = heapq.heappop(self._heap)[2]
        group.queued = False
        return group

    def put_back(self, groups: Sequence[_Group]) -> None:
        """Undo `pop`."""
        for group in groups:
            self._push(group)

    def take(self, group: _Group) -> list[RowMeta]:
        """Hand out the rows of a popped group, by `order`."""
        rows = sorted(group.ready, key=lambda row: row.order)
        group.ready.clear()
        self.whole_rows -= len(rows)
        self.whole_cost -= group.cost
        return rows

    def _update(self, group: _Group) -> None:
        if group.whole:
            group.cost = self._cost(group.ready)
            group.arrival = next(self._arrivals) if group.arrival is None else group.arrival
            self.whole_rows += len(group.ready)
            self.whole_cost += group.cost
        if not group.queued and (group.whole or self._in_order):
            self._push(group)

    def _push(self, group: _Group) -> None:
        group.queued = True
        key = group.order if self._in_order else group.arrival
        assert key is not None
        heapq.heappush(self._heap, (key, group.id, group))


def _exceeds(amount: int, bound: int | None) -> bool:
    return bound is not None and amount > bound


def _check_fits(group: _Group, limit: int | None) -> None:
    if _exceeds(len(group.ready), limit):
        raise QueueError(
            f"group {group.id} has {len(group.ready)} rows, but the claim's limit is {limit}; "
            f"a limit must leave room for a whole group"
        )


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise QueueError(f"{name} is {value}; it must be at least 1")
    return value
