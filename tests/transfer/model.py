"""A reference queue for the tests. It keeps rows in plain dictionaries, and scans all of them each time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.rows.state import TaskState
from tests.transfer.tables import ACTOR, REWARD, ROLLOUT

SPECS = {spec.name: spec for spec in (ROLLOUT, REWARD, ACTOR)}


class LimitTooSmall(Exception):
    """The next group is bigger than the limit of the claim."""


@dataclass(kw_only=True)
class ModelRow:
    """A stored row."""

    id: RowId
    group_id: int
    order: int
    sizes: dict[str, int]
    """The elements of each array written so far; 1 for a number."""
    states: dict[str, TaskState] = field(default_factory=lambda: dict.fromkeys(SPECS, TaskState.WAITING))


@dataclass(kw_only=True)
class Model:
    """A reference queue with three tasks.

    `first_in` and `groups` bound the policies of rollout and reward; `budget` and `window` bound that of the actor.
    """

    first_in: int
    groups: int
    budget: int | None
    window: int | None
    rows: dict[RowId, ModelRow] = field(default_factory=dict)
    arrivals: dict[tuple[str, int], int] = field(default_factory=dict)
    """The time when each group first became whole for a task."""
    clock: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all cells: each cell of the machine's table has elements of 8 bytes."""
        return sum(8 * size for row in self.rows.values() for size in row.sizes.values())

    def put(self, ids: list[RowId], rows: list[NewRow], prompt: int) -> None:
        """Store new rows."""
        for row_id, row in zip(ids, rows, strict=True):
            assert row_id not in self.rows
            self.rows[row_id] = ModelRow(
                id=row_id, group_id=row.group_id, order=row.order, sizes={"prompt_ids": prompt}
            )
        self.update()

    def update(self) -> None:
        """Make rows ready whose inputs are all written, and let groups arrive that are whole for the first time."""
        for row in self.rows.values():
            for task, spec in SPECS.items():
                if row.states[task] is TaskState.WAITING and row.sizes.keys() >= set(spec.reads):
                    row.states[task] = TaskState.READY
        for task in SPECS:
            for group in self.by_group(task):
                if self.whole(task, group) and (task, group[0].group_id) not in self.arrivals:
                    self.clock += 1
                    self.arrivals[task, group[0].group_id] = self.clock

    def set(self, task: str, row_id: RowId, state: TaskState) -> None:
        """Set the state of a row: a lease begins or ends."""
        self.rows[row_id].states[task] = state
        self.update()

    def ack(self, task: str, row_id: RowId, sizes: Mapping[str, int]) -> None:
        """Write outputs and consume the row. After its last task the row is gone."""
        row = self.rows[row_id]
        row.sizes.update(sizes)
        row.states[task] = TaskState.CONSUMED
        if all(state is TaskState.CONSUMED for state in row.states.values()):
            del self.rows[row_id]
            if not any(other.group_id == row.group_id for other in self.rows.values()):
                for name in SPECS:
                    self.arrivals.pop((name, row.group_id), None)
        self.update()

    def restart(self) -> None:
        """End all leases, and let the groups arrive again, by order."""
        for row in self.rows.values():
            for task, state in row.states.items():
                if state is TaskState.LEASED:
                    row.states[task] = TaskState.READY
        self.arrivals.clear()
        self.update()

    def by_group(self, task: str) -> list[list[ModelRow]]:
        """The rows that `task` has still to consume, by group and order."""
        groups: dict[int, list[ModelRow]] = {}
        for row in sorted(self.rows.values(), key=lambda row: row.order):
            if row.states[task] is not TaskState.CONSUMED:
                groups.setdefault(row.group_id, []).append(row)
        return list(groups.values())

    def whole(self, task: str, group: list[ModelRow]) -> bool:
        """Whether all of these rows are ready."""
        return all(row.states[task] is TaskState.READY for row in group)

    def next_claim(self, task: str, limit: int | None) -> list[RowId]:
        """The rows that a claim must get; [] if it must wait."""
        match task:
            case "rollout":
                return self._next_rows(limit)
            case "reward":
                return self._next_groups(limit)
        return self._next_batch(limit)

    def _next_rows(self, limit: int | None) -> list[RowId]:
        ready = [row for row in self.rows.values() if row.states["rollout"] is TaskState.READY]
        ready.sort(key=lambda row: row.order)
        return [row.id for row in ready[: self.first_in]][:limit]

    def _arrived(self, task: str) -> list[list[ModelRow]]:
        groups = [group for group in self.by_group(task) if self.whole(task, group)]
        return sorted(groups, key=lambda group: self.arrivals[task, group[0].group_id])

    def _next_groups(self, limit: int | None) -> list[RowId]:
        rows: list[RowId] = []
        for group in self._arrived("reward")[: self.groups]:
            if limit is not None and len(rows) + len(group) > limit:
                if not rows:
                    raise LimitTooSmall
                break
            rows += [row.id for row in group]
        return rows

    def _next_batch(self, limit: int | None) -> list[RowId]:
        rows: list[RowId] = []
        cost = 0
        for group in self._in_line():
            if not self.whole("actor", group):
                return []
            added = group[0].sizes["prompt_ids"] + sum(row.sizes["response_ids"] for row in group)
            too_long = limit is not None and len(rows) + len(group) > limit
            if too_long and not rows:
                raise LimitTooSmall
            if too_long or (rows and self.budget is not None and cost + added > self.budget):
                return rows
            rows += [row.id for row in group]
            cost += added
            if len(rows) == limit or (self.budget is not None and cost >= self.budget):
                return rows
        return []

    def _in_line(self) -> list[list[ModelRow]]:
        if self.window is None:
            return self._arrived("actor")
        pending = (TaskState.WAITING, TaskState.READY)
        groups = [group for group in self.by_group("actor") if any(row.states["actor"] in pending for row in group)]
        return sorted(groups, key=self._place_in_line)

    def _place_in_line(self, group: list[ModelRow]) -> tuple[int, bool, int]:
        """The place of a group in line. A group that is not whole is last in its window, and bars the next."""
        assert self.window is not None
        window = min(row.order for row in group) // self.window
        whole = self.whole("actor", group)
        return window, not whole, self.arrivals["actor", group[0].group_id] if whole else 0
