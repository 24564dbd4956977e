"""The state of a control plane as a value: what a snapshot, a journal and a message about them hold."""

import msgspec

from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies.base import CellFacts
from tailrace.types import WeightVersion


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
