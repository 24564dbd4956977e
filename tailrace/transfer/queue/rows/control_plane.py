"""The control plane (AsyncFlow, section 3.3): a state machine over row ids, without cells, clock or event loop.

    reserve ─enter─▶ WAITING ──last input column written──▶ READY ──claim──▶ LEASED ──ack──▶ CONSUMED
        └─withdraw─▶ gone                                     ▲                │              (by every task: retired)
                                                              └── nack, expiry ┘
    a storage unit dies, or a group is remade: rows, in any state, leave with their groups, which may be put again

The cost of a put, a claim, an ack and an expiry is proportional to the rows that they change. A written column counts
down the missing inputs of its readers, a policy indexes the ready rows of its task, and leases are kept in the order in
which they expire. Rare operations scan all rows: the loss of a unit, the inventory of a unit, a snapshot.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from tailrace.errors import GroupExists, LeaseError, QueueError, StaleRowError
from tailrace.transfer.queue.base import RowId, TaskStats
from tailrace.transfer.queue.policies.base import CellFacts, RowMeta
from tailrace.transfer.queue.rows.groups import Groups, Standing
from tailrace.transfer.queue.rows.schema import check_outputs
from tailrace.transfer.queue.rows.slots import Slots
from tailrace.transfer.queue.rows.state import (
    NEXT,
    ControlState,
    Ended,
    Lease,
    LeaseRecord,
    Loss,
    LostGroup,
    RowHeader,
    RowRecord,
    TaskState,
    check_state,
)
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import WeightVersion

_HOLD = "hold a claim that takes long with `held`, which renews it, or raise queue.lease_s"


class _Row(msgspec.Struct, eq=False):
    meta: RowMeta
    group_size: int
    units: tuple[int, ...]
    states: list[TaskState]
    """The state for each task, by the task's index."""
    missing: list[int]
    """The number of input columns not written yet, by the task's index."""
    consumed: dict[int, int]
    """The lease under which the row was consumed, by the task's index."""

    def record(self) -> RowRecord:
        """The row as an export holds it."""
        meta = self.meta
        return RowRecord(
            id=meta.id,
            group_id=meta.group_id,
            group_size=self.group_size,
            order=meta.order,
            consumed=self.consumed.copy(),
            facts=CellFacts(lengths=meta.lengths.copy(), version=meta.version),
            units=self.units,
        )


@dataclass(slots=True, eq=False)
class _Task:
    index: int
    entry: QueueTask
    counts: list[int] = field(default_factory=lambda: [0] * len(TaskState))
    """The number of stored rows by state; for CONSUMED, all rows since the queue was made."""
    expired: int = 0

    @property
    def name(self) -> str:
        return self.entry.spec.name


class ControlPlane:
    """The rows of one table, which `check_table` has checked. `now` never goes back; its origin does not matter.

    A lease is live until `expire` is called at or after its deadline. So call `expire` before anything else.
    """

    def __init__(self, tasks: Sequence[QueueTask], *, lease_s: float, controllers: int = 1) -> None:
        """`controllers`: those of the queue; see `Groups`."""
        self._tasks = {entry.spec.name: _Task(index, entry) for index, entry in enumerate(tasks)}
        self._readers: dict[str, list[_Task]] = {}
        for task in self._tasks.values():
            for column in dict.fromkeys(task.entry.spec.reads):
                self._readers.setdefault(column, []).append(task)
        self._last = [
            task.index
            for task in self._tasks.values()
            if not any(self._readers.get(column) for column in task.entry.spec.writes)
        ]
        """The indices of tasks whose outputs no task reads. After a loss they do not get consumed rows again."""
        self._writers = {column: task for task in self._tasks.values() for column in task.entry.spec.writes}
        self._writing = [task.index for task in self._tasks.values() if task.entry.spec.writes]
        """The indices of tasks that have outputs."""
        self._waiting = [TaskState.WAITING] * len(tasks)
        """The states of a row that is new to every task."""
        self._missing_by_columns: dict[tuple[str, ...], list[int]] = {}
        self._lease_s = lease_s
        self._slots = Slots[_Row]()
        self._controllers = controllers
        self._groups = Groups(controllers=controllers)
        self.version: WeightVersion = 0
        """The newest weight version that `advance` was called with."""
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        """The live leases in the order of their deadlines: all last equally long, so the last renewed expires last."""
        self._next_lease = 1

    def __len__(self) -> int:
        """The number of stored rows."""
        return len(self._slots)

    @property
    def next_deadline(self) -> float | None:
        """The deadline of the lease that expires next; None where there is no lease."""
        return next(iter(self._leases.values())).deadline if self._leases else None

    def state(self, task: str, row: RowId) -> TaskState:
        """The state of `row` for `task`.

        Raises:
            QueueError: no such task.
            StaleRowError: the row is gone.
        """
        return self._row(row).states[self._task(task).index]

    @property
    def ready_tasks(self) -> list[str]:
        """The tasks that have READY rows; their policies may still wait for more."""
        return [name for name, task in self._tasks.items() if task.counts[TaskState.READY]]

    def stats(self) -> dict[str, TaskStats]:
        """The counts of each task."""
        return {
            name: TaskStats(
                waiting=task.counts[TaskState.WAITING],
                ready=task.counts[TaskState.READY],
                leased=task.counts[TaskState.LEASED],
                consumed=task.counts[TaskState.CONSUMED],
                expired=task.expired,
            )
            for name, task in self._tasks.items()
        }

    @property
    def lost_groups(self) -> dict[int, int]:
        """The groups that have to be put again, each with how often it was remade."""
        return {group.group_id: self._groups.remade.get(group.group_id, 0) for group in self._groups.lost}

    def advance(self, version: WeightVersion) -> None:
        """Note that weights of `version` are available; a version older than the newest one is ignored."""
        self.version = max(self.version, version)

    def check_groups(self, rows: Sequence[RowHeader]) -> Standing:
        """Check whether `rows` are whole groups that may enter, and return their standing.

        NEW groups may enter when there is room. LOST groups may enter at once: their room was theirs before. BEING_PUT
        groups have to wait: one of them is reserved and not written yet.

        Raises:
            QueueError: a group is not whole.
            GroupExists: a group is in the queue, or was and has left.
        """
        return self._groups.check(rows)

    def has_entered(self, group_id: int) -> bool:
        """Whether a group is in the queue, or was and is not lost."""
        return self._groups.standing(group_id) in (Standing.PRESENT, Standing.LEFT)

    def being_put(self, rows: Sequence[RowHeader]) -> int | None:
        """The id of a group of `rows` that is reserved and not written yet; None where there is none."""
        standings = ((row.group_id, self._groups.standing(row.group_id)) for row in rows)
        return next((group_id for group_id, standing in standings if standing is Standing.BEING_PUT), None)

    def is_lost(self, rows: Sequence[RowHeader]) -> bool:
        """Whether all of `rows` are of lost groups, including lost groups that are being put again."""
        return all(self._groups.is_lost(row.group_id) for row in rows)

    def put(self, rows: Sequence[RowHeader], facts: Sequence[CellFacts]) -> list[RowId]:
        """Add whole groups. `facts`: the facts about the cells of each row. Some rows may leave at once; see `enter`.

        Raises:
            QueueError, GroupExists: see `check_groups`; nothing was added.
        """
        if self.check_groups(rows) is Standing.BEING_PUT:
            raise GroupExists(f"group {self.being_put(rows)} is being put already; each group is put once")
        ids = self.reserve(rows)
        self.enter(ids, rows, facts)
        return ids

    def reserve(self, rows: Sequence[RowHeader], ids: Sequence[RowId] | None = None) -> list[RowId]:
        """Return ids for whole groups that are being written. They count as stored, but no task can claim them yet.

        The groups have passed `check_groups`. `ids`: the ids that the rows had before, when a journal is replayed.
        """
        self._groups.reserve(rows)
        if ids is None:
            return self._slots.new(len(rows))
        for row_id in ids:
            self._slots.take(row_id)
        return list(ids)

    def withdraw(self, ids: Sequence[RowId], rows: Sequence[RowHeader]) -> None:
        """Remove reserved rows that will not be written."""
        for row_id, row in zip(ids, rows, strict=True):
            self._free_slot(row_id.slot, row.group_id)

    def enter(
        self,
        ids: Sequence[RowId],
        rows: Sequence[RowHeader],
        facts: Sequence[CellFacts],
        *,
        units: tuple[int, ...] = (),
    ) -> list[RowId]:
        """Add reserved rows, which are now written on `units`. Return rows that have left at once.

        A row leaves at once where no task has still to consume it: it had left before its group was lost.
        """
        groups: dict[int, list[_Row]] = {}
        left: list[RowId] = []
        for row_id, row, row_facts in zip(ids, rows, facts, strict=True):
            consumed = self._groups.consumed_before(row, self._last)
            if consumed and len(consumed) == len(self._tasks):
                left.append(row_id)
            entered = self._add(row_id, row, row_facts, units, consumed)
            groups.setdefault(row.group_id, []).append(entered)
        self._announce_groups(groups)
        for row_id in left:
            self._free_slot(row_id.slot, self._row(row_id).meta.group_id)
        return left

    def check_claim(self, task: str, rank: int | None) -> None:
        """Check whether rows of `task` may be claimed for `rank`.

        Raises:
            QueueError: there is no such task, or its policy does not hand out rows to `rank`.
        """
        self._task(task).entry.policy.check_rank(rank)

    def next_window(self, task: str) -> int | None:
        """See `Policy.next_window`."""
        return self._task(task).entry.policy.next_window

    def window_of(self, task: str, order: int) -> int:
        """See `Policy.window_of`."""
        return self._task(task).entry.policy.window_of(order)

    def claim(self, task: str, *, limit: int | None, rank: int | None = None, now: float) -> Lease | None:
        """Lease the rows that the task's policy chooses; None where it has to wait for more.

        Raises:
            QueueError: see `check_claim`; or the policy refused `limit`.
        """
        owner = self._task(task)
        chosen = owner.entry.policy.take(limit, rank)
        if not chosen:
            return None
        assert limit is None or len(chosen) <= limit, f"the policy of task {task!r} chose more than {limit} rows"
        return self.hold(self._next_lease, task, [meta.id for meta in chosen], now)

    def hold(self, lease_id: int, task: str, row_ids: Sequence[RowId], now: float) -> Lease:
        """Lease ready rows that the task's policy does not hold, or no longer holds."""
        owner = self._task(task)
        rows = {row_id: self._row(row_id) for row_id in row_ids}
        assert len(rows) == len(row_ids), f"the policy of task {task!r} chose a row twice"
        for row in rows.values():
            self._move(row, owner, TaskState.LEASED)
        return self._lease(lease_id, task, rows.values(), now)

    def ack(
        self,
        lease_id: int,
        facts: Mapping[RowId, CellFacts],
        *,
        missed: Collection[int] = (),
    ) -> list[RowId]:
        """Mark leased rows as consumed and their outputs as written; return the rows that left the queue.

        `facts`: the facts about each row's outputs. `missed`: units that the outputs could not be written to; from now
        on they do not count as having the rows.

        Raises:
            StaleRowError, LeaseError: a row is gone or not under this lease, or no unit has its outputs; nothing was
                changed.
            ColumnError: the columns are not exactly the task's outputs; nothing was changed.
        """
        held = self._held(lease_id, facts)
        if not held:
            return []
        lease = self._leases[lease_id]
        task = self._tasks[lease.task]
        for row, outputs in zip(held, facts.values(), strict=True):
            check_outputs(task.entry.spec, row.meta.id, outputs.lengths)
            if row.units and not set(row.units).difference(missed):
                raise StaleRowError(f"the outputs of {row.meta.id} could be written to none of its units {row.units}")
        for row in held if missed else ():
            row.units = tuple(unit for unit in row.units if unit not in missed)
        return [
            row.meta.id
            for row, outputs in zip(held, facts.values(), strict=True)
            if self._consume(row, lease, task, outputs)
        ]

    def nack(self, lease_id: int, rows: Sequence[RowId] | None) -> list[RowId]:
        """Make leased rows ready again, and return them. With None, give back all rows that the lease still holds.

        Raises:
            StaleRowError, LeaseError: as for `ack`.
        """
        if rows is None:
            rows = self.leased(lease_id)
        held = self._held(lease_id, dict.fromkeys(rows))
        for row in held:
            self._give_back(row, self._leases[lease_id])
        return [row.meta.id for row in held]

    def remake(self, lease_id: int, groups: Collection[int], most: int) -> Loss:
        """Take whole groups under a lease out, but those that were remade `most` times; see `TransferQueue.remake`.

        Raises:
            QueueError, LeaseError: see `TransferQueue.remake`; nothing was changed.
        """
        taken = [group_id for group_id in dict.fromkeys(groups) if self._groups.remade.get(group_id, 0) < most]
        lease = self._leases.get(lease_id)
        if groups and lease is None:
            raise LeaseError(f"lease {lease_id} has ended, so that no group of it can be remade; {_HOLD}")
        held = Counter(row.group_id for row in lease.rows.values()) if lease is not None else Counter[int]()
        sizes = {self._row(row_id).meta.group_id: self._row(row_id).group_size for row_id in self.leased(lease_id)}
        for group_id in groups:
            if held[group_id] != sizes.get(group_id, -1):
                raise QueueError(
                    f"{held[group_id]} rows of group {group_id} are under lease {lease_id}, and a group is remade as a "
                    "whole; claim whole groups"
                )
        for group_id in taken:
            self._groups.remake(group_id)
        return self._lose_groups(taken, remade=True)

    def leased(self, lease_id: int) -> list[RowId]:
        """The rows that a lease still holds; empty where it has ended."""
        lease = self._leases.get(lease_id)
        return [] if lease is None else list(lease.rows)

    def renew(self, lease_id: int, now: float, rows: Sequence[RowId] = ()) -> None:
        """Restart the lease's time limit. `rows`: have to be under it, or nothing is changed.

        Raises:
            LeaseError: the lease has expired, all of its rows were acked or nacked, or one of `rows` is not under it.
            StaleRowError: one of `rows` has left the queue.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseError(
                f"lease {lease_id} holds no rows (any more), so it cannot be renewed: it expired after "
                f"{self._lease_s:g} s, or all of them were acked or given back; {_HOLD}"
            )
        self._held(lease_id, rows)
        lease.deadline = now + self._lease_s
        self._leases.move_to_end(lease_id)

    def expire(self, now: float) -> list[Ended]:
        """End every lease whose deadline has come. Their rows are ready again."""
        ended = []
        while self._leases and (lease := next(iter(self._leases.values()))).deadline <= now:
            ended.append(self.end(lease.id))
        return ended

    def end(self, lease_id: int) -> Ended:
        """End a lease whose holder is dead or whose time is over; harmless where the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return Ended(lease_id, [])
        self._tasks[lease.task].expired += len(lease.rows)
        return Ended(lease_id, self.nack(lease_id, None))

    def lose(self, unit: int, row_ids: Collection[RowId] | None = None) -> Loss:
        """Take in that a storage unit is gone, or that it does not have `row_ids`.

        Rows that no other unit has leave the queue, with the rest of their groups.
        """
        groups: set[int] = set()
        for row in self._slots if row_ids is None else map(self._row, row_ids):
            if unit in row.units:
                row.units = tuple(other for other in row.units if other != unit)
                if not row.units:
                    groups.add(row.meta.group_id)
        return self._lose_groups(groups)

    def copied(self, unit: int, row_ids: Iterable[RowId]) -> None:
        """Take in that a storage unit has copies of all parts of `row_ids`, to which no task writes outputs."""
        for row in map(self._row, row_ids):
            assert unit not in row.units, f"{row.meta.id} is on unit {unit} already"
            row.units = (*row.units, unit)

    def rows_on(self, chosen: Callable[[tuple[int, ...]], bool]) -> list[RowId]:
        """The rows that are on chosen units: `chosen` tells by the numbers of a row's units."""
        return [row.meta.id for row in self._slots if chosen(row.units)]

    def is_written_to(self, row_id: RowId) -> bool:
        """Whether a task with outputs has a live lease on a row."""
        states = self._row(row_id).states
        return any(states[task] is TaskState.LEASED for task in self._writing)

    def has_left(self, row_id: RowId) -> bool:
        """Whether a row id was given out, and its row has left or was withdrawn."""
        return self._slots.has_freed(row_id)

    def is_stored(self, row_id: RowId) -> bool:
        """Whether a row has entered and has not left."""
        return self._slots.find(row_id) is not None

    def units(self, row_id: RowId) -> tuple[int, ...]:
        """The numbers of the storage units that have a stored row."""
        return self._row(row_id).units

    def tags(self, task: str, row_id: RowId) -> list[int]:
        """The tag of each column that `task` reads: 0 where the row's put brought it, else the lease that wrote it."""
        row = self._row(row_id)
        return [
            row.consumed[self._writers[column].index] if column in self._writers else 0
            for column in self._tasks[task].entry.spec.reads
        ]

    def stored(self, unit: int) -> dict[RowId, dict[int, list[str]]]:
        """The rows that `unit` has, by row id; for each row, the columns of its parts, by tag."""
        return {row.meta.id: self._parts(row) for row in self._slots if unit in row.units}

    def parts(self, row_id: RowId) -> dict[int, list[str]]:
        """The columns of each valid part of a stored row, by tag."""
        return self._parts(self._row(row_id))

    def facts(self, row_id: RowId) -> CellFacts:
        """The facts about all cells of a row that are written so far."""
        meta = self._row(row_id).meta
        return CellFacts(lengths=meta.lengths, version=meta.version)

    def export(self) -> ControlState:
        """The state as a snapshot holds it. Reserved rows are not in it."""
        return ControlState(
            generations=list(self._slots.generations),
            next_lease=self._next_lease,
            version=self.version,
            rows=[row.record() for row in self._slots],
            seen=self._groups.seen,
            lost=self._groups.lost,
            remade=self._groups.remade.copy(),
            consumed=[task.counts[TaskState.CONSUMED] for task in self._tasks.values()],
            expired=[task.expired for task in self._tasks.values()],
        )

    def restore(self, state: ControlState, *, leases: Sequence[LeaseRecord] = (), now: float = 0.0) -> list[Lease]:
        """Take over the state of another control plane of the same table. Rows become ready by their `order`.

        `leases`: the leases that go on; their time limits restart. All other leased rows become ready.

        Raises:
            QueueError: this control plane has held rows before, or `state` contradicts itself; nothing was changed.
        """
        self.check_restore(state)
        self._slots = Slots(state.generations)
        for record in state.rows:
            self._slots.take(record.id)
        self._next_lease = state.next_lease
        self.advance(state.version)
        self._groups = Groups.of(state, controllers=self._controllers)
        held = {(lease.task, row_id) for lease in leases for row_id in lease.rows}
        self._add_records(sorted(state.rows, key=lambda record: record.order), held)
        for task, consumed, expired in zip(self._tasks.values(), state.consumed, state.expired, strict=True):
            task.counts[TaskState.CONSUMED], task.expired = consumed, expired
            for group in state.lost:
                task.entry.policy.was_lost(group.rows_of(task.index))
        return [self._lease(lease.id, lease.task, list(map(self._row, lease.rows)), now) for lease in leases]

    def check_restore(self, state: ControlState) -> None:
        """Check whether `state` may be restored.

        Raises:
            QueueError: this control plane has held rows before, or `state` contradicts itself.
        """
        if self._slots.generations:
            raise QueueError("a snapshot is restored into a new queue, and this one has held rows")
        check_state(state, [task.entry.spec for task in self._tasks.values()])

    def _free_slot(self, slot: int, group_id: int) -> None:
        self._slots.free(slot)
        self._groups.remove_row(group_id)

    def _parts(self, row: _Row) -> dict[int, list[str]]:
        parts: dict[int, list[str]] = {}
        for column in row.meta.lengths:
            writer = self._writers.get(column)
            parts.setdefault(0 if writer is None else row.consumed[writer.index], []).append(column)
        return parts

    def _lease(self, lease_id: int, task: str, rows: Iterable[_Row], now: float) -> Lease:
        lease = Lease(lease_id, task, {row.meta.id: row.meta for row in rows}, now + self._lease_s)
        self._leases[lease_id] = lease
        self._next_lease = max(self._next_lease, lease_id + 1)
        return lease

    def _add_records(self, records: Iterable[RowRecord], held: Collection[tuple[str, RowId]]) -> None:
        groups: dict[int, list[_Row]] = {}
        for record in records:
            header = RowHeader(record.group_id, record.group_size, record.order)
            row = self._add(record.id, header, record.facts, record.units, record.consumed.copy())
            groups.setdefault(record.group_id, []).append(row)
        self._announce_groups(groups, held)

    def _add(
        self, row_id: RowId, header: RowHeader, facts: CellFacts, units: tuple[int, ...], consumed: dict[int, int]
    ) -> _Row:
        meta = RowMeta(
            id=row_id,
            group_id=header.group_id,
            order=header.order,
            lengths={**facts.lengths},
            version=facts.version,
        )
        states = [*self._waiting]
        for index in consumed:
            states[index] = TaskState.CONSUMED
        row = _Row(meta, header.group_size, units, states, [*self._missing(tuple(meta.lengths))], consumed)
        self._slots.fill(row_id, row)
        return row

    def _announce_groups(
        self, groups: Mapping[int, Sequence[_Row]], held: Collection[tuple[str, RowId]] = frozenset()
    ) -> None:
        for group_id, rows in groups.items():
            self._groups.enter(group_id)
            for task in self._tasks.values():
                self._announce(rows, task, held)

    def _missing(self, columns: tuple[str, ...]) -> list[int]:
        """The number of input columns that are not among `columns`, by the task's index."""
        missing = self._missing_by_columns.get(columns)
        if missing is None:
            missing = [len(set(task.entry.spec.reads).difference(columns)) for task in self._tasks.values()]
            self._missing_by_columns[columns] = missing
        return missing

    def _announce(self, rows: Sequence[_Row], task: _Task, held: Collection[tuple[str, RowId]]) -> None:
        """Announce a group to a task's policy, then its rows that are ready already. Rows in `held` are leased."""
        left = [row for row in rows if row.states[task.index] is TaskState.WAITING]
        if len(left) < len(rows):
            task.entry.policy.begun(rows[0].meta.order)
        if not left:
            return
        task.counts[TaskState.WAITING] += len(left)
        leased = {row.meta.id for row in left if (task.name, row.meta.id) in held} if held else set()
        task.entry.policy.added([row.meta for row in left], leased=bool(leased) and len(leased) == len(left))
        for row in left:
            if row.meta.id in leased:
                self._move(row, task, TaskState.READY)
                self._move(row, task, TaskState.LEASED)
            elif row.missing[task.index] == 0:
                self._make_ready(row, task)

    def _consume(self, row: _Row, lease: Lease, task: _Task, outputs: CellFacts) -> bool:
        """Finish a row for a task; return whether this was the last task."""
        self._release(row, lease)
        self._move(row, task, TaskState.CONSUMED)
        task.entry.policy.consumed(row.meta)
        row.meta.learn(outputs)
        for reader in chain.from_iterable(self._readers.get(column, ()) for column in outputs.lengths):
            row.missing[reader.index] -= 1
            if row.missing[reader.index] == 0 and reader.index not in row.consumed:
                self._make_ready(row, reader)
        row.consumed[task.index] = lease.id
        if len(row.consumed) < len(self._tasks):
            return False
        self._free_slot(row.meta.id.slot, row.meta.group_id)
        return True

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
        assert state in NEXT[old], f"{row.meta.id} of task {task.name!r} cannot go from {old} to {state}"
        row.states[task.index] = state
        task.counts[old] -= 1
        task.counts[state] += 1

    def _lose_groups(self, groups: Collection[int], *, remade: bool = False) -> Loss:
        by_group: dict[int, list[_Row]] = {group_id: [] for group_id in groups}
        for row in self._slots:
            if row.meta.group_id in by_group:
                by_group[row.meta.group_id].append(row)
        for group_id, rows in by_group.items():
            last = () if remade else self._last  # tasks that do not get again what they have consumed
            left = {row.meta.order: [index for index in row.consumed if index in last] for row in rows}
            self._groups.lose(LostGroup(group_id=group_id, group_size=rows[0].group_size, left=left))
            for task in self._tasks.values():
                self._lose_rows_of(rows, task)
        lost = {row.meta.id: row for row in chain.from_iterable(by_group.values())}
        for lease in list(self._leases.values()):
            for row_id in lost.keys() & lease.rows.keys():
                self._release(lost[row_id], lease)
        for row in lost.values():
            self._free_slot(row.meta.id.slot, row.meta.group_id)
        return Loss({row_id: row.units for row_id, row in lost.items()}, sorted(by_group))

    def _lose_rows_of(self, rows: Sequence[_Row], task: _Task) -> None:
        left = [row for row in rows if row.states[task.index] is not TaskState.CONSUMED]
        if not left:
            return
        task.entry.policy.lost([row.meta for row in left])
        for row in left:
            task.counts[row.states[task.index]] -= 1

    def _task(self, name: str) -> _Task:
        if name not in self._tasks:
            raise QueueError(f"no task {name!r} in the table; its tasks are {sorted(self._tasks)}")
        return self._tasks[name]

    def _row(self, row_id: RowId) -> _Row:
        row = self._slots.find(row_id)
        if row is None:
            raise StaleRowError(f"{row_id} is gone (or never was): every task has consumed it")
        return row

    def _held(self, lease_id: int, row_ids: Iterable[RowId]) -> list[_Row]:
        """The rows with these ids, all of which are under the lease.

        Raises:
            StaleRowError, LeaseError: as for `ack`.
        """
        rows = [self._row(row_id) for row_id in row_ids]
        lease = self._leases.get(lease_id)
        for row in rows:
            if lease is None or row.meta.id not in lease.rows:
                raise LeaseError(f"{row.meta.id} is not under lease {lease_id}: {self._why_not(row, lease_id)}")
        return rows

    def _why_not(self, row: _Row, lease_id: int) -> str:
        """The reason why a row is not under a lease, as far as it is known."""
        if lease_id in row.consumed.values():
            return "it was acked under it before"
        if lease_id in self._leases:
            return "it was given back before, or is none of the rows of that claim"
        if not 0 < lease_id < self._next_lease:
            return "there was no such lease"
        return f"the lease expired after {self._lease_s:g} s, or the row was given back before; {_HOLD}"
