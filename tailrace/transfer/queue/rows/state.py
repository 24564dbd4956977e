"""The state of a control plane as values, for snapshots, journals and messages; and the results of its changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.policies.base import CellFacts, RowMeta
from tailrace.types import TaskSpec, WeightVersion

_MAX_COUNT = 2**62
"""The limit of lease numbers and generations in a state. It is so far below 2**63 that none ever overflows int64."""


class TaskState(IntEnum):
    """The state of one row for one task."""

    WAITING = 0
    """Some input column is not written yet. Next: READY."""
    READY = 1
    """The row may be claimed. Next: LEASED."""
    LEASED = 2
    """The row is under a live lease. Next: CONSUMED by an ack, READY by a nack or when the lease expires."""
    CONSUMED = 3
    """The row was acked. No state follows."""


NEXT = ((TaskState.READY,), (TaskState.LEASED,), (TaskState.READY, TaskState.CONSUMED), ())
"""The states that may follow each state, by its number."""


class RowHeader(NamedTuple):
    """A new row without its cells."""

    group_id: int
    group_size: int
    order: int

    @classmethod
    def of(cls, row: NewRow) -> "RowHeader":
        """The header of a row to put."""
        return cls(row.group_id, row.group_size, row.order)


class RowRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A row as a snapshot holds it."""

    id: RowId
    group_id: int
    group_size: int
    order: int
    consumed: dict[int, int]
    """The tasks that have consumed the row, by their places in the table, each with the lease under which it did."""
    facts: CellFacts
    """The facts about all cells written so far, with the columns in the order in which they were written."""
    units: tuple[int, ...] = ()
    """The numbers of the storage units that have the row."""


class LostGroup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A group that has to be put again."""

    group_id: int
    group_size: int
    left: dict[int, list[int]]
    """The rows that were still in the queue, by `order`, each with the tasks that do not get it again."""

    def rows_of(self, task: int) -> list[RowMeta]:
        """The rows of `left` that will come again for a task, named by its place in the table. Their ids are void."""
        return [
            RowMeta(id=RowId(-1, -1), group_id=self.group_id, order=order, lengths={})
            for order, consumed in self.left.items()
            if task not in consumed
        ]


class ControlState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The whole state of a control plane but its leases: a leased row counts as ready."""

    generations: list[int]
    """For each slot, the generation of its row; of its next row where it is empty."""
    next_lease: int
    version: WeightVersion
    """See `TransferQueue.advance`."""
    rows: list[RowRecord]
    seen: list[tuple[int, int]]
    """The groups that were ever in the queue: ascending ranges of group_id, the end not included. Of one of several
    controllers, ranges of group_id // controllers: it has every `controllers`-th group."""
    lost: list[LostGroup]
    remade: dict[int, int]
    """How often groups that are in the queue or lost were remade, by group_id, where that is not 0."""
    consumed: list[int]
    """The number of rows that each task has consumed since the queue was made."""
    expired: list[int]


@dataclass(slots=True, eq=False)
class Lease:
    """Rows leased to a task until `deadline`, in the order of the policy. Acked and nacked rows leave it."""

    id: int
    task: str
    rows: dict[RowId, RowMeta]
    deadline: float


class LeaseRecord(NamedTuple):
    """A lease that goes on in another control plane."""

    id: int
    task: str
    rows: list[RowId]


class Ended(NamedTuple):
    """A lease, or some rows of it, that ended without an ack: outputs written under it for them never count."""

    lease: int
    rows: list[RowId]


class Loss(NamedTuple):
    """The rows and groups that have left, to be put again."""

    rows: dict[RowId, tuple[int, ...]]
    """The rows that left the queue, each with the other units that have it."""
    groups: list[int]


def check_state(state: ControlState, tasks: Sequence[TaskSpec]) -> None:
    """Check that a state fits a table of these tasks.

    Raises:
        QueueError: the state contradicts itself, or does not fit the table.
    """
    slots = {record.id.slot for record in state.rows}
    counts_fit = len(slots) == len(state.rows) and len(state.consumed) == len(state.expired) == len(tasks)
    if not (counts_fit and _rows_fit(state, tasks) and _groups_fit(state, tasks)):
        raise QueueError("the snapshot contradicts itself: its rows do not fit its slots and tasks")
    names = chain(*((row.group_id, row.order) for row in state.rows), (lost.group_id for lost in state.lost))
    if not all(-(2**63) <= name < 2**63 for name in (*names, *state.remade)):
        raise QueueError("the snapshot has a group_id or an order that is no int64")
    if state.next_lease < 1 or not all(0 <= count < _MAX_COUNT for count in (state.next_lease, *state.generations)):
        raise QueueError(f"the snapshot counts leases from below 1, generations from below 0, or up to {_MAX_COUNT}")


def _rows_fit(state: ControlState, tasks: Sequence[TaskSpec]) -> bool:
    writers = {column: place for place, task in enumerate(tasks) for column in task.writes}
    return all(
        0 <= record.id.slot < len(state.generations)
        and state.generations[record.id.slot] == record.id.generation
        and record.consumed.keys() < set(range(len(tasks)))
        and record.consumed.keys() >= {writers[column] for column in record.facts.lengths if column in writers}
        for record in state.rows
    )


def _groups_fit(state: ControlState, tasks: Sequence[TaskSpec]) -> bool:
    ends = list(chain.from_iterable(state.seen))
    lost_fit = all(0 <= task < len(tasks) for lost in state.lost for left in lost.left.values() for task in left)
    lost_fit = lost_fit and all(0 < times < _MAX_COUNT for times in state.remade.values())
    return lost_fit and all(before < after for before, after in pairwise(ends))
