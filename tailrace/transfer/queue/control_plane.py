"""Who may have which row (AsyncFlow, section 3.3): a state machine over row ids, without cells, clock or event loop.

    put ──▶ WAITING ──last input column written──▶ READY ──claim──▶ LEASED ──ack──▶ CONSUMED (by every task: retired)

Every change costs in proportion to the rows that it changes: a written column counts down what its readers miss, a
policy keeps the index of its task's ready rows, leases stand in the order in which they expire. Nothing scans the rows.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tailrace.errors import ColumnError, LeaseError, QueueError, StaleRowError
from tailrace.transfer.queue.base import NewRow, RowId, TaskStats
from tailrace.transfer.queue.policies.base import CellFacts, RowMeta
from tailrace.transfer.queue.table import QueueTask


class TaskState(Enum):
    """The state of one row for one task."""

    WAITING = "waiting"
    """Some input column is not written yet. Next: READY."""
    READY = "ready"
    """May be claimed. Next: LEASED."""
    LEASED = "leased"
    """Under a live lease. Next: CONSUMED by an ack, READY by a nack or when the lease expires."""
    CONSUMED = "consumed"
    """Acked: the end."""


_STEPS = frozenset(
    {
        (TaskState.WAITING, TaskState.READY),
        (TaskState.READY, TaskState.LEASED),
        (TaskState.LEASED, TaskState.READY),
        (TaskState.LEASED, TaskState.CONSUMED),
    }
)


@dataclass(slots=True, eq=False)
class Lease:
    """Rows handed to a task until `deadline`, in the order of the policy; acked and nacked ones leave it."""

    id: int
    task: str
    rows: dict[RowId, RowMeta]
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """A row in an exported state."""

    id: RowId
    group_id: int
    order: int
    consumed: tuple[int, ...]
    """Places in the table of the tasks that have consumed it."""
    facts: CellFacts
    """Of all cells written so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """Everything but leases: a leased row counts as ready."""

    generations: list[int]
    """By slot: the generation of its row or, where it is empty, of its next one."""
    next_lease: int
    rows: list[RowRecord]
    consumed: list[int]
    """By task: rows since the queue was made."""
    expired: list[int]


@dataclass(slots=True, eq=False)
class _Row:
    meta: RowMeta
    states: list[TaskState]
    """By task."""
    missing: list[int]
    """By task: input columns not written yet."""
    unconsumed: int
    """Tasks that have still to consume it."""


@dataclass(slots=True, eq=False)
class _Task:
    index: int
    entry: QueueTask
    counts: dict[TaskState, int] = field(default_factory=lambda: dict.fromkeys(TaskState, 0))
    """Rows stored by state, but CONSUMED since the queue was made."""
    expired: int = 0

    @property
    def name(self) -> str:
        return self.entry.spec.name


class ControlPlane:
    """The rows of one table (checked by `check_table`). `now` never goes back; its origin does not matter.

    A lease is alive until `expire` is called at or after its deadline, so call that before anything else.
    """

    def __init__(self, tasks: Sequence[QueueTask], *, lease_s: float) -> None:
        self._tasks = {entry.spec.name: _Task(index, entry) for index, entry in enumerate(tasks)}
        self._readers: dict[str, list[_Task]] = {}
        for task in self._tasks.values():
            for column in dict.fromkeys(task.entry.spec.reads):
                self._readers.setdefault(column, []).append(task)
        self._lease_s = lease_s
        self._slots: list[_Row | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self._groups: dict[int, int] = {}
        """Live rows of each group."""
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        """By deadline: every lease lasts equally long, so the newest or last renewed one expires last."""
        self._next_lease = 0

    def __len__(self) -> int:
        """Rows stored."""
        return len(self._slots) - len(self._free)

    @property
    def next_deadline(self) -> float | None:
        """When the next lease expires."""
        return next(iter(self._leases.values())).deadline if self._leases else None

    def state(self, task: str, row: RowId) -> TaskState:
        """The state of `row` for `task`.

        Raises:
            QueueError: no such task.
            StaleRowError: the row is gone.
        """
        return self._row(row).states[self._task(task).index]

    def ready_rows(self, task: str) -> int:
        """Rows that `task` could claim, as far as states go.

        Raises:
            QueueError: no such task.
        """
        return self._task(task).counts[TaskState.READY]

    def stats(self) -> dict[str, TaskStats]:
        """Counts by task."""
        return {
            name: TaskStats(**{state.value: task.counts[state] for state in TaskState}, expired=task.expired)
            for name, task in self._tasks.items()
        }

    def check_groups(self, rows: Sequence[NewRow]) -> None:
        """Whether `rows` are whole groups that are not in the queue.

        Raises:
            QueueError: they are not.
        """
        groups: dict[int, list[NewRow]] = {}
        for row in rows:
            groups.setdefault(row.group_id, []).append(row)
        for group_id, members in groups.items():
            if wrong := [row.group_size for row in members if row.group_size != len(members)]:
                raise QueueError(
                    f"group {group_id} says group_size {wrong[0]}, but {len(members)} of its rows were put; "
                    f"put whole groups, with one group_size"
                )
            if group_id in self._groups:
                raise QueueError(
                    f"group {group_id} is in the queue already ({self._groups[group_id]} rows); "
                    f"a group_id may come again only when all rows of its group have left"
                )

    def put(self, rows: Sequence[NewRow], facts: Sequence[CellFacts]) -> list[RowId]:
        """Add whole groups. `facts`: of the cells of each row.

        Raises:
            QueueError: see `check_groups`; nothing was added.
        """
        self.check_groups(rows)
        records = [
            RowRecord(id=self._new_id(), group_id=row.group_id, order=row.order, consumed=(), facts=row_facts)
            for row, row_facts in zip(rows, facts, strict=True)
        ]
        self._admit(records)
        return [record.id for record in records]

    def check_claim(self, task: str, rank: int | None) -> None:
        """Whether rows of `task` may be claimed for `rank`.

        Raises:
            QueueError: no such task, or its policy does not hand out rows to `rank`.
        """
        self._task(task).entry.policy.check_rank(rank)

    def claim(self, task: str, *, limit: int | None, rank: int | None = None, now: float) -> Lease | None:
        """Lease the rows that the task's policy chooses; None where it has to wait for more.

        Raises:
            QueueError: see `check_claim`; or the policy refused `limit`.
        """
        owner = self._task(task)
        chosen = owner.entry.policy.take(limit, rank)
        if not chosen:
            return None
        rows = {meta.id: meta for meta in chosen}
        assert len(rows) == len(chosen), f"the policy of task {task!r} chose a row twice"
        assert limit is None or len(rows) <= limit, f"the policy of task {task!r} chose more than {limit} rows"
        for row_id in rows:
            self._move(self._row(row_id), owner, TaskState.LEASED)
        lease = Lease(self._next_lease, task, rows, now + self._lease_s)
        self._leases[lease.id] = lease
        self._next_lease += 1
        return lease

    def ack(self, lease_id: int, facts: Mapping[RowId, CellFacts]) -> list[RowId]:
        """Mark leased rows consumed and their outputs, which `facts` tells of, written; return the rows that left.

        Raises:
            StaleRowError, LeaseError: a row is gone, or not under this lease; nothing was changed.
            ColumnError: the columns are not exactly the task's outputs; nothing was changed.
        """
        held = self._held(lease_id, facts)
        if not held:
            return []
        lease = self._leases[lease_id]
        task = self._tasks[lease.task]
        for row, outputs in zip(held, facts.values(), strict=True):
            _check_outputs(task, row, outputs.lengths)
        return [
            row.meta.id
            for row, outputs in zip(held, facts.values(), strict=True)
            if self._consume(row, lease, task, outputs)
        ]

    def nack(self, lease_id: int, rows: Sequence[RowId] | None) -> None:
        """Make leased rows ready again; None gives back all that the lease still holds, be it none.

        Raises:
            StaleRowError, LeaseError: as for `ack`.
        """
        if rows is None:
            lease = self._leases.get(lease_id)
            rows = [] if lease is None else list(lease.rows)
        for row in self._held(lease_id, dict.fromkeys(rows)):
            self._give_back(row, self._leases[lease_id])

    def renew(self, lease_id: int, now: float) -> None:
        """Start the lease's time anew.

        Raises:
            LeaseError: it has expired, or all of its rows were acked or nacked.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseError(f"lease {lease_id} holds no rows (any more), so it cannot be renewed")
        lease.deadline = now + self._lease_s
        self._leases.move_to_end(lease_id)

    def expire(self, now: float) -> int:
        """Take back the rows of every lease whose deadline has come; return how many."""
        expired = 0
        while self._leases and (lease := next(iter(self._leases.values()))).deadline <= now:
            task = self._tasks[lease.task]
            task.expired += len(lease.rows)
            expired += len(lease.rows)
            for row_id in list(lease.rows):
                self._give_back(self._row(row_id), lease)
        return expired

    def export(self) -> ControlState:
        """The state of a snapshot."""
        return ControlState(
            generations=list(self._generations),
            next_lease=self._next_lease,
            rows=[_record(row) for row in self._slots if row is not None],
            consumed=[task.counts[TaskState.CONSUMED] for task in self._tasks.values()],
            expired=[task.expired for task in self._tasks.values()],
        )

    def restore(self, state: ControlState) -> None:
        """Take over the state of another control plane of the same table. Rows become ready by their `order`.

        Raises:
            QueueError: this one has held rows before, or `state` contradicts itself; nothing was changed.
        """
        if self._generations:
            raise QueueError("a snapshot is restored into a new queue, and this one has held rows")
        _check_state(state, len(self._tasks))
        self._generations = list(state.generations)
        self._slots = [None] * len(self._generations)
        self._next_lease = state.next_lease
        self._admit(sorted(state.rows, key=lambda record: record.order))
        self._free = [slot for slot in reversed(range(len(self._slots))) if self._slots[slot] is None]
        for task, consumed, expired in zip(self._tasks.values(), state.consumed, state.expired, strict=True):
            task.counts[TaskState.CONSUMED] = consumed
            task.expired = expired

    def _new_id(self) -> RowId:
        if not self._free:
            self._slots.append(None)
            self._generations.append(0)
            self._free.append(len(self._slots) - 1)
        slot = self._free.pop()
        return RowId(slot, self._generations[slot])

    def _admit(self, records: Iterable[RowRecord]) -> None:
        groups: dict[int, list[_Row]] = {}
        for record in records:
            groups.setdefault(record.group_id, []).append(self._enter(record))
        for rows in groups.values():
            for task in self._tasks.values():
                self._announce(rows, task)

    def _enter(self, record: RowRecord) -> _Row:
        meta = RowMeta(id=record.id, group_id=record.group_id, order=record.order, lengths={})
        meta.learn(record.facts)
        states = [TaskState.WAITING] * len(self._tasks)
        for index in record.consumed:
            states[index] = TaskState.CONSUMED
        missing = [len(set(task.entry.spec.reads).difference(meta.lengths)) for task in self._tasks.values()]
        row = _Row(meta, states, missing, len(states) - len(record.consumed))
        self._slots[record.id.slot] = row
        self._groups[record.group_id] = self._groups.get(record.group_id, 0) + 1
        return row

    def _announce(self, rows: Sequence[_Row], task: _Task) -> None:
        """Tell a task's policy of a group, then of the rows in it that are ready from the start."""
        left = [row for row in rows if row.states[task.index] is TaskState.WAITING]
        if not left:
            return
        task.counts[TaskState.WAITING] += len(left)
        task.entry.policy.added([row.meta for row in left])
        for row in left:
            if row.missing[task.index] == 0:
                self._make_ready(row, task)

    def _consume(self, row: _Row, lease: Lease, task: _Task, outputs: CellFacts) -> bool:
        """Finish a row for a task; whether that was the last task."""
        self._release(row, lease)
        self._move(row, task, TaskState.CONSUMED)
        task.entry.policy.consumed(row.meta)
        row.meta.learn(outputs)
        for column in outputs.lengths:
            for reader in self._readers.get(column, ()):
                row.missing[reader.index] -= 1
                if row.missing[reader.index] == 0:
                    self._make_ready(row, reader)
        row.unconsumed -= 1
        if row.unconsumed == 0:
            self._retire(row)
        return row.unconsumed == 0

    def _give_back(self, row: _Row, lease: Lease) -> None:
        self._release(row, lease)
        self._make_ready(row, self._tasks[lease.task])

    def _release(self, row: _Row, lease: Lease) -> None:
        del lease.rows[row.meta.id]
        if not lease.rows:
            del self._leases[lease.id]

    def _make_ready(self, row: _Row, task: _Task) -> None:
        self._move(row, task, TaskState.READY)
        task.entry.policy.ready(row.meta)

    def _move(self, row: _Row, task: _Task, state: TaskState) -> None:
        old = row.states[task.index]
        assert (old, state) in _STEPS, f"{row.meta.id} of task {task.name!r} cannot go from {old} to {state}"
        row.states[task.index] = state
        task.counts[old] -= 1
        task.counts[state] += 1

    def _retire(self, row: _Row) -> None:
        slot, group_id = row.meta.id.slot, row.meta.group_id
        self._slots[slot] = None
        self._generations[slot] += 1
        self._free.append(slot)
        self._groups[group_id] -= 1
        if self._groups[group_id] == 0:
            del self._groups[group_id]

    def _task(self, name: str) -> _Task:
        if name not in self._tasks:
            raise QueueError(f"no task {name!r} in the table; its tasks are {sorted(self._tasks)}")
        return self._tasks[name]

    def _row(self, row_id: RowId) -> _Row:
        row = self._slots[row_id.slot] if 0 <= row_id.slot < len(self._slots) else None
        if row is None or row.meta.id != row_id:
            raise StaleRowError(f"{row_id} is gone (or never was): every task has consumed it")
        return row

    def _held(self, lease_id: int, row_ids: Iterable[RowId]) -> list[_Row]:
        """The rows with these ids, all of them under the lease."""
        rows = [self._row(row_id) for row_id in row_ids]
        lease = self._leases.get(lease_id)
        for row in rows:
            if lease is None or row.meta.id not in lease.rows:
                raise LeaseError(
                    f"{row.meta.id} is not under lease {lease_id}: it was acked or nacked before, or the lease expired"
                )
        return rows


def _check_outputs(task: _Task, row: _Row, columns: Iterable[str]) -> None:
    expected, got = set(task.entry.spec.writes), set(columns)
    if expected != got:
        raise ColumnError(
            f"{row.meta.id}: task {task.name!r} writes {sorted(expected)}; "
            f"missing: {sorted(expected - got)}, not its own: {sorted(got - expected)}"
        )


def _record(row: _Row) -> RowRecord:
    consumed = tuple(index for index, state in enumerate(row.states) if state is TaskState.CONSUMED)
    meta = row.meta
    facts = CellFacts(lengths=meta.lengths, version=meta.version)
    return RowRecord(id=meta.id, group_id=meta.group_id, order=meta.order, consumed=consumed, facts=facts)


def _check_state(state: ControlState, tasks: int) -> None:
    slots = {record.id.slot for record in state.rows}
    rows_fit = len(slots) == len(state.rows) and all(
        0 <= record.id.slot < len(state.generations)
        and state.generations[record.id.slot] == record.id.generation
        and set(record.consumed) < set(range(tasks))
        for record in state.rows
    )
    if not rows_fit or len(state.consumed) != tasks or len(state.expired) != tasks:
        raise QueueError("the snapshot contradicts itself: its rows do not fit its slots and tasks")
