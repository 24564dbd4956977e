"""Which ready rows a task is handed next.

    cells ──▶ CellFacts ──control plane──▶ RowMeta ──added, ready, consumed, lost──▶ Policy ──take──▶ rows of a claim

Each task of a queue owns one policy, which keeps its own index of the rows that are ready: the control plane tells it
of every change, and `take` removes what it chooses, so choosing never looks at rows that are not chosen. Choosing and
leasing are one step: a policy that gathers (a token budget) leaves its rows where they are until a whole claim is
there, so that two consumers can never hold halves of what each other needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.types import WeightVersion


class CellFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of cells without their contents."""

    lengths: dict[str, int]
    """Elements of each array, bytes of text and JSON, 1 for numbers."""
    version: WeightVersion | None = None
    """The smallest entry of `weight_versions`; None where that is not among the cells, or empty."""


class RowMeta(msgspec.Struct, kw_only=True, eq=False):
    """What a policy sees of a row. It learns more as columns are written, so `id` alone tells rows apart."""

    id: RowId
    group_id: int
    order: int
    lengths: dict[str, int]
    """See `CellFacts.lengths`; of the columns written so far."""
    version: WeightVersion | None = None
    """See `CellFacts.version`."""

    def learn(self, facts: CellFacts) -> None:
        """More columns were written."""
        self.lengths.update(facts.lengths)
        if facts.version is not None:
            self.version = facts.version


class Policy(ABC):
    """Chooses among the ready rows of one task. Only `take` and `check_rank` may raise."""

    name: ClassVar[str]
    """As tables call it: the `type` of its configuration."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the policy looks at; its task must read them, so that they are written when a row is ready."""
        return ()

    @property
    def ranks(self) -> Sequence[int | None]:
        """For whom claims may be: ranks, where a batch is split among them, or the one None, where nobody is named."""
        return (None,)

    def check_rank(self, rank: int | None) -> None:
        """Whether rows may be claimed for `rank`.

        Raises:
            QueueError: it is not among `ranks`.
        """
        if rank in self.ranks:
            return
        if None in self.ranks:
            raise QueueError(
                f"a claim names rank {rank}, but policy {self.name!r} splits nothing among ranks; leave it out"
            )
        known = f"policy {self.name!r} splits batches among ranks 0 to {len(self.ranks) - 1}"
        if rank is None:
            raise QueueError(f"a claim names no rank, but {known}; pass the one that claims: rank=0")
        raise QueueError(f"a claim names rank {rank}, but {known}; pass one of them")

    @abstractmethod
    def added(self, rows: Sequence[RowMeta], *, leased: bool = False) -> None:
        """A group came: its rows that the task has still to consume; none is ready yet.

        `leased`: all of them are, by leases that go on from before this policy was made.
        """

    @abstractmethod
    def ready(self, row: RowMeta) -> None:
        """All inputs of `row` are written, or its lease ended without an ack."""

    @abstractmethod
    def consumed(self, row: RowMeta) -> None:
        """`row`, taken before, was acked."""

    @abstractmethod
    def lost(self, rows: Sequence[RowMeta]) -> None:
        """All rows of a group that the task has still to consume leave without having been, in whatever state.

        It happens when a storage unit dies, and may take time in proportion to all rows.
        """

    def was_lost(self, rows: Sequence[RowMeta]) -> None:
        """Rows of a group, be it none, that were lost before this policy was made, and will come again."""
        if rows:
            self.added(rows)
            self.lost(rows)

    @abstractmethod
    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        """Remove and return the ready rows of the next claim, at most `limit`; [] says wait for more.

        Raises:
            QueueError: `limit` can never be met, or `rank` is not among `ranks`; nothing was removed.
        """


def at_least_one(name: str, value: int) -> int:
    """`value`, the bound of a policy.

    Raises:
        QueueError: it is less than 1.
    """
    if value < 1:
        raise QueueError(f"{name} is {value}; it must be at least 1")
    return value
