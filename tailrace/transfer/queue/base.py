"""The transfer queue's interface.

A row is one sample; its cells fill up column by column. For every task of the table it is in one state:

    WAITING ──inputs written──▶ READY ──claim──▶ LEASED ──ack──▶ CONSUMED
                                  ▲                │
                                  └──nack, expiry──┘

A claim holds rows under a lease. An ack writes the task's output cells and marks the rows consumed in one step. A row
consumed by every task leaves the queue and frees its memory.

Who waits on whom: `put` waits while the queue is full; `claim` waits until its policy finds rows among those that are
ready. Both are woken by events, never by polling, and raise QueueTimeout after a limit.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.types import Value, WeightVersion


class RowId(NamedTuple):
    """A slot and the generation of the row in it: an id whose row has left is refused, never another row's."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A row to put."""

    group_id: int
    """Rows of one group are put together and have equal group_id."""
    group_size: int
    """Rows of the group."""
    order: int
    """Place among all rows of the run: training step, prompt, sample. Policies that keep an order keep this one."""
    cells: Mapping[str, Value]
    """Columns known from the start."""
    not_before: WeightVersion = 0
    """Admission by weight version: it is let in when the queue has heard of this one, see `TransferQueue.advance`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claimed row with the columns that its task reads."""

    id: RowId
    group_id: int
    order: int
    cells: Mapping[str, Value]
    """Arrays are read-only."""
    units: tuple[int, ...] = ()
    """Numbers of the storage units that have it; a queue inside one process has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows under a lease. Every row is acked or nacked, together or one by one, before the lease expires."""

    lease_id: int
    lease_s: float
    """Seconds that the lease lasts from now, or from a renewal."""
    task: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStats:
    """Rows of one task by state."""

    waiting: int
    ready: int
    leased: int
    consumed: int
    """Since the queue was made."""
    expired: int
    """Rows that went back because a lease expired or its holder died, since the queue was made."""
    claims: int = 0
    """Consumers waiting for rows."""
    wait_s: float = 0.0
    """Seconds that claims which have been answered had to wait, in all, since the queue was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStats:
    """One storage unit."""

    number: int
    name: str
    alive: bool
    rows: int
    bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """What a queue holds now."""

    rows: int
    bytes: int
    blocked_puts: int
    """Producers waiting to put rows."""
    blocked_by: str | None = None
    """What the first of them waits for, in words; None where nobody waits."""
    put_wait_s: float = 0.0
    """Seconds that puts which have been answered had to wait, in all, since the queue was made."""
    version: WeightVersion = 0
    """The newest weight version that the queue has heard of."""
    lost_groups: int = 0
    """Groups that have to be put again, see `TransferQueue.lost_groups`."""
    closed: bool = False
    """Whether it was closed, see `TransferQueue.close`."""
    tasks: Mapping[str, TaskStats]
    units: tuple[UnitStats, ...] = ()

    @property
    def used(self) -> bool:
        """Whether rows are in the queue, or were."""
        return bool(self.rows or self.lost_groups or any(task.consumed for task in self.tasks.values()))


class TransferQueue(ABC):
    """The contract; every implementation keeps it for many producers and consumers at once."""

    @abstractmethod
    async def put(self, rows: Sequence[NewRow], *, timeout: float | None = None) -> list[RowId]:
        """Store `rows`, all or none, when there is room; whole groups only.

        Raises:
            ColumnError: an unknown column, a wrong dtype or shape.
            QueueError: a group that is incomplete, or rows that never fit the capacity.
            GroupExists: a group that was put before, whether its rows are still there or have left.
            StaleRowError: across processes, until the timeout, the rows were withdrawn before they were written whole:
                the units that were to have them are lost.
            QueueTimeout, QueueClosed
        """

    @abstractmethod
    async def claim(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claim:
        """Lease rows whose input columns are written, chosen by the task's policy; wait until there are some.

        `limit`: at most so many rows, those that the caller still wants: a policy that gathers rows (a token budget, a
        whole batch) hands out what it has when it holds that many. A group bigger than the limit is an error.
        `rank`: for whom, where the policy splits batches among ranks; None where it does not.

        Raises:
            QueueError: no such task; a rank that the policy does not know, or none where it needs one.
            QueueTimeout, QueueClosed
        """

    @abstractmethod
    async def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
        """Write the output cells of some or all rows of `claim` and mark them consumed, in one step, or fail whole.

        Raises:
            ColumnError: an output column of the task is missing or is not the task's; a wrong dtype or shape.
            LeaseError: a row is not under this lease (expired, acked or nacked before).
            StaleRowError: a row is gone, or lost with its storage units.
            QueueError: across processes, a row that was acked under this lease before, with other cells.
        """

    @abstractmethod
    async def nack(self, claim: Claim, rows: Sequence[RowId] | None = None) -> None:
        """Give rows back: they are ready again at once. By default all that are still leased, be it none.

        Raises:
            LeaseError, StaleRowError: as for `ack`.
        """

    @abstractmethod
    async def renew(self, claim: Claim) -> None:
        """Start the lease's time anew.

        Raises:
            LeaseError: it has expired, or all of its rows were acked or nacked.
        """

    @abstractmethod
    async def advance(self, version: WeightVersion) -> None:
        """Weights of `version` are there: rows that wait for it may go in. One older than the newest is passed over."""

    @abstractmethod
    async def lost_groups(self, *, timeout: float | None = None) -> list[int]:
        """Wait until rows are lost with the storage unit that had them; the group_ids that have to be put again.

        A group stays lost until it is put again, whole. Tasks whose outputs nobody needs (the actor) are not handed
        those of its rows that they have consumed; all others are handed all of them, whatever they did before.

        Raises:
            QueueTimeout, QueueClosed
        """

    @abstractmethod
    async def stats(self) -> QueueStats:
        """Counts of this moment."""

    @abstractmethod
    async def snapshot(self) -> bytes:
        """The rows of one moment, their cells and what was consumed; leased rows count as ready.

        Nothing has to be stopped for it: puts, claims and acks before and after that moment are as they were.
        """

    @abstractmethod
    async def restore(self, snapshot: bytes) -> None:
        """Fill an empty queue of the same table from a snapshot.

        Raises:
            QueueError: the queue is not empty, or the snapshot is of another table or not one at all.
        """

    @abstractmethod
    async def close(self) -> None:
        """Wake everyone who waits, in any process, with QueueClosed. Acks, nacks and `snapshot` still work."""
