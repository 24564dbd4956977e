"""The state of a control plane as values: what snapshots, journals and messages hold, and what its changes bring."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies.base import CellFacts, RowMeta
from tailrace.types import WeightVersion


class Newcoming(Protocol):
    """What a control plane needs to know of a new row; `NewRow` is such a one."""

    @property
    def group_id(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def order(self) -> int: ...


class Newcomer(NamedTuple):
    """A new row without its cells."""

    group_id: int
    group_size: int
    order: int


class RowRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A row."""

    id: RowId
    group_id: int
    group_size: int
    order: int
    consumed: dict[int, int]
    """The tasks that have consumed it, by their places in the table: the lease under which each did."""
    facts: CellFacts
    """Of all cells written so far; columns in the order in which they were."""
    units: tuple[int, ...] = ()
    """Numbers of the storage units that have it."""


class LostGroup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A group that has to be put again."""

    group_id: int
    group_size: int
    left: dict[int, list[int]]
    """By `order`, rows that were still in the queue: the tasks that have consumed them for good."""


class ControlState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Everything but leases: a leased row counts as ready."""

    generations: list[int]
    """By slot: the generation of its row or, where it is empty, of its next one."""
    next_lease: int
    version: WeightVersion
    """See `TransferQueue.advance`."""
    rows: list[RowRecord]
    seen: list[tuple[int, int]]
    """Groups that were ever in the queue: ranges of group_id, the end not included, ascending."""
    lost: list[LostGroup]
    consumed: list[int]
    """By task: rows since the queue was made."""
    expired: list[int]


@dataclass(slots=True, eq=False)
class Lease:
    """Rows handed to a task until `deadline`, in the order of the policy; acked and nacked ones leave it."""

    id: int
    task: str
    rows: dict[RowId, RowMeta]
    deadline: float


class Ended(NamedTuple):
    """A lease that ended, or rows of it, without an ack: what was written under it will never count."""

    lease: int
    rows: list[RowId]


class Loss(NamedTuple):
    """What went with a storage unit."""

    rows: dict[RowId, tuple[int, ...]]
    """Those that left the queue, with the other units that have some of their cells."""
    groups: list[int]


def check_state(state: ControlState, tasks: int) -> None:
    """Whether a state fits a table of so many tasks.

    Raises:
        QueueError: it contradicts itself.
    """
    slots = {record.id.slot for record in state.rows}
    rows_fit = len(slots) == len(state.rows) and all(
        0 <= record.id.slot < len(state.generations)
        and state.generations[record.id.slot] == record.id.generation
        and record.consumed.keys() < set(range(tasks))
        for record in state.rows
    )
    if not rows_fit or len(state.consumed) != tasks or len(state.expired) != tasks:
        raise QueueError("the snapshot contradicts itself: its rows do not fit its slots and tasks")
