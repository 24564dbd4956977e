"""The shares of several controllers: which has a group, the names of its rows outside, and counts of all together.

    group_id % controllers ──▶ the controller       slot outside = slot * controllers + controller

A controller knows nothing of the others. It numbers slots, leases and units from 0, as a single one does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tailrace.transfer.queue.base import Claim, QueueStats, Row, RowId, TaskStats, UnitStats


@dataclass(frozen=True, slots=True)
class Part:
    """A claim as one controller has granted it."""

    controller: int
    claim: Claim
    window: int
    """The window of the run that its first row is in; see `Policy.window_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedClaim(Claim):
    """A claim of rows of one controller or several."""

    parts: tuple[Part, ...]
    """Without the cells of their rows."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The numbering of a queue of so many controllers."""

    controllers: int

    def of_group(self, group_id: int) -> int:
        """The controller that has a group."""
        return group_id % self.controllers

    def of_row(self, row: RowId) -> int:
        """The controller that has a row, by the row's id outside."""
        return row.slot % self.controllers

    def outside(self, number: int, controller: int) -> int:
        """The number outside of what has `number` at `controller`: a slot, a lease or a unit."""
        return number * self.controllers + controller

    def row_outside(self, row: RowId, controller: int) -> RowId:
        """The id outside of a row."""
        return RowId(self.outside(row.slot, controller), row.generation)

    def row_inside(self, row: RowId) -> RowId:
        """The id that a row has at its controller."""
        return RowId(row.slot // self.controllers, row.generation)

    def join(self, parts: Sequence[Part]) -> PartedClaim:
        """Join parts to one claim. The rows of several parts are in the order of the run."""
        first = parts[0]
        rows = [self._row(row, part.controller) for part in parts for row in part.claim.rows]
        if len(parts) > 1:
            rows.sort(key=lambda row: row.order)
        return PartedClaim(
            lease_id=self.outside(first.claim.lease_id, first.controller),
            lease_s=min(part.claim.lease_s for part in parts),
            task=first.claim.task,
            rows=tuple(rows),
            parts=tuple(map(_bare, parts)),
        )

    def _row(self, row: Row, controller: int) -> Row:
        units = tuple(self.outside(unit, controller) for unit in row.units)
        return replace(row, id=self.row_outside(row.id, controller), units=units)

    def join_stats(self, stats: Sequence[QueueStats]) -> QueueStats:
        """The counts of the whole queue, from those of each controller."""
        return QueueStats(
            rows=sum(one.rows for one in stats),
            bytes=sum(one.bytes for one in stats),
            blocked_puts=sum(one.blocked_puts for one in stats),
            blocked_by=next((one.blocked_by for one in stats if one.blocked_by is not None), None),
            put_wait_s=sum(one.put_wait_s for one in stats),
            version=min(one.version for one in stats),
            lost_groups=sum(one.lost_groups for one in stats),
            lacking_rows=sum(one.lacking_rows for one in stats),
            closed=any(one.closed for one in stats),
            tasks={name: _task(one.tasks[name] for one in stats) for name in stats[0].tasks},
            units=tuple(self._unit(unit, number) for number, one in enumerate(stats) for unit in one.units),
        )

    def _unit(self, unit: UnitStats, controller: int) -> UnitStats:
        return replace(unit, number=self.outside(unit.number, controller))


def _bare(part: Part) -> Part:
    """A part whose rows have no cells: these would hold memory of units for as long as the claim is kept."""
    rows = tuple(replace(row, cells={}) for row in part.claim.rows)
    return replace(part, claim=replace(part.claim, rows=rows))


def _task(stats: Iterable[TaskStats]) -> TaskStats:
    those = list(stats)
    return TaskStats(
        waiting=sum(one.waiting for one in those),
        ready=sum(one.ready for one in those),
        leased=sum(one.leased for one in those),
        consumed=sum(one.consumed for one in those),
        expired=sum(one.expired for one in those),
        claims=sum(one.claims for one in those),
        wait_s=sum(one.wait_s for one in those),
    )
