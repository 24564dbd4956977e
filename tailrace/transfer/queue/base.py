"""The interface of the transfer queue.

A row is one sample. Its cells are filled column by column. For every task of the table it is in one state:

    WAITING ──inputs written──▶ READY ──claim──▶ LEASED ──ack──▶ CONSUMED
                                  ▲                │
                                  └──nack, expiry──┘

A claim holds rows under a lease. An ack writes the task's output cells and marks the rows as consumed, in one step. A
row that every task has consumed leaves the queue and frees its memory.

Waiting: `put` waits while the queue is full. `claim` waits until its policy finds rows among the ready ones. Both are
woken by events, never by polling, and raise QueueTimeout after a limit.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.types import Value, WeightVersion


class RowId(NamedTuple):
    """A slot and the generation of the row in it. The id of a row that has left is refused, and never names another."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A row to put."""

    group_id: int
    """The group of the row. All rows of a group are put together."""
    group_size: int
    """The number of rows in the group."""
    order: int
    """The place among all rows of the run: by training step, prompt, sample. Policies that keep an order use it."""
    cells: Mapping[str, Value]
    """The columns that are known from the start."""
    not_before: WeightVersion = 0
    """The weight version that the row waits for. It is admitted when `TransferQueue.advance` has named this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claimed row with the columns that its task reads."""

    id: RowId
    group_id: int
    order: int
    cells: Mapping[str, Value]
    """The values by column. Arrays are read-only."""
    units: tuple[int, ...] = ()
    """The numbers of the storage units that have the row; a queue inside one process has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows under a lease. Ack or nack every row, together or one by one, before the lease expires."""

    lease_id: int
    lease_s: float
    """The seconds that the lease lasts from the claim, or from a renewal."""
    task: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStats:
    """The counts of one task: rows by state, and claims."""

    waiting: int
    ready: int
    leased: int
    consumed: int
    """Rows consumed since the queue was made."""
    expired: int
    """Rows given back since the queue was made because a lease expired or its holder died."""
    claims: int = 0
    """Claims that wait for rows."""
    wait_s: float = 0.0
    """Seconds that answered claims have waited in all since the queue was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStats:
    """The counts of one storage unit."""

    number: int
    name: str
    alive: bool
    rows: int
    bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The counts of a queue at one moment."""

    rows: int
    bytes: int
    blocked_puts: int
    """Puts that wait."""
    blocked_by: str | None = None
    """The reason why the first put waits, in words; None where no put waits."""
    put_wait_s: float = 0.0
    """Seconds that answered puts have waited in all since the queue was made."""
    version: WeightVersion = 0
    """The newest weight version that `TransferQueue.advance` was called with."""
    lost_groups: int = 0
    """Groups that have to be put again; see `TransferQueue.lost_groups`."""
    lacking_rows: int = 0
    """Rows that are on fewer storage units than `queue.replicas`, not counting units that are to leave."""
    closed: bool = False
    """Whether the queue was closed; see `TransferQueue.close`."""
    tasks: Mapping[str, TaskStats]
    units: tuple[UnitStats, ...] = ()

    @property
    def used(self) -> bool:
        """Whether the queue holds rows or has held some."""
        return bool(self.rows or self.lost_groups or any(task.consumed for task in self.tasks.values()))


class TransferQueue(ABC):
    """The contract of a transfer queue. Every implementation keeps it for many producers and consumers at once."""

    @abstractmethod
    async def put(self, rows: Sequence[NewRow], *, timeout: float | None = None) -> list[RowId]:
        """Store `rows`, all or none, when there is room. Only whole groups may be put.

        Raises:
            ColumnError: a column is unknown, or a value has a wrong dtype or shape.
            QueueError: a group is incomplete, or the rows can never fit the capacity.
            GroupExists: a group was put before, whether its rows are still there or have left.
            StorageFull: the storage units had no room for the rows until the timeout.
            StaleRowError: the storage units that were to have the rows died each time, until the timeout. The rows are
                not in the queue.
            QueueTimeout, QueueClosed
        """

    @abstractmethod
    async def claim(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claim:
        """Lease ready rows, which the task's policy chooses. Wait until there are some.

        `limit`: the most rows that the caller still wants. A policy that gathers rows (a token budget, a whole batch)
        hands out its rows when it holds that many. A group larger than the limit is an error.
        `rank`: the rank that claims, where the policy splits batches among ranks; None where it does not.

        Raises:
            QueueError: there is no such task; the policy does not know the rank, or needs one and got none.
            QueueTimeout, QueueClosed
        """

    @abstractmethod
    async def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
        """Write the output cells of rows of `claim`, some or all, and mark the rows as consumed, in one step.

        An ack that fails changes nothing.

        Raises:
            ColumnError: an output column is missing or is not the task's, or a value has a wrong dtype or shape.
            LeaseError: a row is not under this lease (expired, acked or nacked before).
            StaleRowError: a row is gone, or lost with its storage units.
            QueueError: across processes, a row was acked under this lease before, with other cells.
        """

    @abstractmethod
    async def nack(self, claim: Claim, rows: Sequence[RowId] | None = None) -> None:
        """Give rows back: they are ready again at once. By default, give back all that are still leased, even none.

        Raises:
            LeaseError, StaleRowError: as for `ack`.
        """

    @abstractmethod
    async def renew(self, claim: Claim) -> None:
        """Restart the lease's time limit.

        Raises:
            LeaseError: the lease has expired, or all of its rows were acked or nacked.
        """

    @abstractmethod
    async def advance(self, version: WeightVersion) -> None:
        """Admit rows that wait for weights of `version`, which are now available. An older version is ignored."""

    @abstractmethod
    async def remake(self, claim: Claim, groups: Collection[int], *, most: int) -> list[int]:
        """Take whole groups of `claim` out of the queue, from all tasks, to be put again with other rows.

        They are in `lost_groups` from then on. A group that was remade `most` times before stays under the lease.
        Return the group_ids that were taken.

        Raises:
            QueueError: a group is not wholly under the lease.
            LeaseError: the lease has ended.
        """

    @abstractmethod
    async def lost_groups(self, *, timeout: float | None = None) -> dict[int, int]:
        """Wait until groups have to be put again. Return their group_ids, each with how often it was remade.

        They were lost with a storage unit, or taken out by `remake`. A group that was never remade is put with the same
        rows as before. It stays lost until it is put again, whole. A task whose outputs no task reads (the actor) does
        not get rows again that it has consumed, unless the group was remade since. All other tasks get all rows of the
        group again.

        Raises:
            QueueTimeout, QueueClosed
        """

    @abstractmethod
    async def stats(self) -> QueueStats:
        """Return the present counts."""

    @abstractmethod
    async def snapshot(self) -> bytes:
        """Return the rows of one moment, their cells and the tasks that consumed them; leased rows count as ready.

        No caller has to stop for it: puts, claims and acks before and after that moment go on as usual.
        """

    @abstractmethod
    async def restore(self, snapshot: bytes) -> None:
        """Fill an empty queue of the same table from a snapshot.

        Raises:
            QueueError: the queue is not empty, or `snapshot` is of another table or is no snapshot.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all waits, in any process, with QueueClosed. Acks, nacks and `snapshot` still work."""
