"""The interface of policies: the rules by which tasks choose among their ready rows.

    cells ──▶ CellFacts ──control plane──▶ RowMeta ──added, ready, consumed, lost──▶ Policy ──take──▶ rows of a claim

Each task of a queue owns one policy, which keeps its own index of the ready rows. The control plane calls it with every
change, and `take` removes the rows that it chooses, so choosing never looks at other rows. Choosing and leasing are one
step: a policy that gathers rows, such as a token budget, leaves them in its index until a whole claim is there. So two
consumers can never each hold half of the rows that the other one needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.types import WeightVersion


class CellFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about cells that are known without their contents."""

    lengths: dict[str, int]
    """The length of each cell, by column: elements of an array, bytes of text and JSON, 1 for a number."""
    version: WeightVersion | None = None
    """The smallest entry of `weight_versions`; None where that column is not among the cells, or is empty."""


class RowMeta(msgspec.Struct, kw_only=True, eq=False):
    """A row as a policy sees it. Its facts grow as columns are written, so only `id` tells rows apart."""

    id: RowId
    group_id: int
    order: int
    lengths: dict[str, int]
    """The lengths of the columns written so far; see `CellFacts.lengths`."""
    version: WeightVersion | None = None
    """See `CellFacts.version`."""

    def learn(self, facts: CellFacts) -> None:
        """Add the facts about columns that were written."""
        self.lengths.update(facts.lengths)
        if facts.version is not None:
            self.version = facts.version


class Policy(ABC):
    """Chooses among the ready rows of one task. Only `take` and `check_rank` may raise."""

    name: ClassVar[str]
    """The name of the policy in tables: the `type` of its configuration."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the policy looks at. Its task must read them, so that they are written in a ready row."""
        return ()

    @property
    def gathers(self) -> bool:
        """Whether a claim gathers as many rows as its limit says."""
        return False

    @property
    def next_window(self) -> int | None:
        """The window of the run whose rows are handed out next; None where there are none. 0 for one without windows.

        Each of several controllers has a part of every window. A client asks for it, so that no task gets rows of a
        window while another controller has rows of an earlier one.
        """
        return 0

    def window_of(self, order: int) -> int:
        """The window of the run that a row of this `order` is in; 0 for a policy without windows."""
        return 0

    @property
    def ranks(self) -> Sequence[int | None]:
        """The ranks that claims may name, where batches are split among ranks; else None alone: claims name no rank."""
        return (None,)

    def check_rank(self, rank: int | None) -> None:
        """Check that rows may be claimed for `rank`.

        Raises:
            QueueError: `rank` is not among `ranks`.
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
        """Add a group, given by the rows that the task has still to consume. None of them is ready yet.

        `leased`: all of the rows are leased, by leases that go on from before this policy was made.
        """

    @abstractmethod
    def ready(self, row: RowMeta) -> None:
        """Add a ready row: all of its inputs are written, or its lease ended without an ack."""

    @abstractmethod
    def consumed(self, row: RowMeta) -> None:
        """Note that `row`, which was taken before, was acked."""

    @abstractmethod
    def lost(self, rows: Sequence[RowMeta]) -> None:
        """Remove a lost group: all of its rows that the task has still to consume leave, in any state.

        This happens when a storage unit dies, and may take time in proportion to all rows.
        """

    def begun(self, order: int) -> None:  # noqa: B027 - only a policy with windows has anything to note
        """Note that rows of the window of this `order` have been consumed, maybe before this policy was made."""

    def was_lost(self, rows: Sequence[RowMeta]) -> None:
        """Note the rows of a group that was lost before this policy was made and will come again; may be empty."""
        if rows:
            self.added(rows)
            self.lost(rows)

    @abstractmethod
    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        """Remove and return the ready rows of the next claim, at most `limit`; [] means to wait for more.

        Raises:
            QueueError: `limit` can never be met or is missing where the policy needs it, a group is larger than a
                batch, or `rank` is not among `ranks`; nothing was removed.
        """


def at_least_one(name: str, value: int) -> int:
    """Return `value`, the bound of a policy, which is called `name` in the error.

    Raises:
        QueueError: `value` is less than 1.
    """
    if value < 1:
        raise QueueError(f"{name} is {value}; it must be at least 1")
    return value
