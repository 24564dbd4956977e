"""The groups that are in a queue, that have left it, and that were lost.

put ──▶ in the queue ──all rows left──▶ seen: it cannot be put again
             └── its storage unit dies, or it is remade ──▶ lost ──put again, whole──▶ in the queue
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from tailrace.errors import GroupExists, QueueError
from tailrace.transfer.queue.rows.state import ControlState, LostGroup, RowHeader, RowRecord


class Standing(Enum):
    """The standing of a group, or of groups that are put together."""

    NEW = "new"
    BEING_PUT = "being put"
    """The rows are reserved, and not written yet."""
    PRESENT = "present"
    LEFT = "left"
    """All rows were consumed."""
    LOST = "lost"
    """The group has to be put again."""


class Groups:
    """The groups of one control plane. Those of reserved rows count as in the queue."""

    def __init__(
        self,
        rows: Iterable[RowRecord] = (),
        seen: Iterable[tuple[int, int]] = (),
        lost: Iterable[LostGroup] = (),
        remade: Mapping[int, int] = MappingProxyType({}),
        *,
        controllers: int = 1,
    ) -> None:
        """The arguments are as in a ControlState.

        `controllers`: those of the queue. One of them has every `controllers`-th group, and `seen` counts these.
        """
        self._controllers = controllers
        self._rows = Counter(row.group_id for row in rows)
        self._seen = Intervals(seen)
        self._lost = {group.group_id: group for group in lost}
        self.remade = dict(remade)
        """See `ControlState.remade`."""

    @classmethod
    def of(cls, state: ControlState, *, controllers: int = 1) -> "Groups":
        """Make the groups of an exported state."""
        return cls(state.rows, state.seen, state.lost, state.remade, controllers=controllers)

    @property
    def seen(self) -> list[tuple[int, int]]:
        """See `ControlState.seen`."""
        return self._seen.ranges()

    @property
    def lost(self) -> list[LostGroup]:
        """The groups that have to be put again."""
        return list(self._lost.values())

    def check(self, rows: Sequence[RowHeader]) -> Standing:
        """Check whether `rows` are whole groups that may enter; see `ControlPlane.check_groups`.

        Raises:
            QueueError: a group is not whole.
            GroupExists: a group is in the queue, or was and has left.
        """
        sizes: defaultdict[int, int] = defaultdict(int)
        for row in rows:
            sizes[row.group_id] += 1
        for row in rows:
            if row.group_size != sizes[row.group_id]:
                raise QueueError(
                    f"group {row.group_id} says group_size {row.group_size}, but {sizes[row.group_id]} of its rows "
                    f"were put; put whole groups, with one group_size"
                )
        standings = [self.standing(group_id) for group_id in sizes]
        if Standing.BEING_PUT in standings:
            return Standing.BEING_PUT
        for group_id, standing in zip(sizes, standings, strict=True):
            if standing is Standing.PRESENT:
                raise GroupExists(f"group {group_id} is in the queue already; each group is put once")
            if standing is Standing.LEFT:
                raise GroupExists(f"group {group_id} has been in the queue, and all of its rows were consumed")
        return Standing.NEW if Standing.NEW in standings else Standing.LOST

    def standing(self, group_id: int) -> Standing:
        """The present standing of a group."""
        if group_id in self._lost:
            return Standing.BEING_PUT if group_id in self._rows else Standing.LOST
        if group_id in self._rows:
            return Standing.PRESENT if self._has_seen(group_id) else Standing.BEING_PUT
        return Standing.LEFT if self._has_seen(group_id) else Standing.NEW

    def _has_seen(self, group_id: int) -> bool:
        return group_id // self._controllers in self._seen

    def is_lost(self, group_id: int) -> bool:
        """Whether a group has to be put again; true also while it is being put."""
        return group_id in self._lost

    def reserve(self, rows: Sequence[RowHeader]) -> None:
        """Count rows that are being written; `check` has let their groups in."""
        for row in rows:
            self._rows[row.group_id] += 1

    def enter(self, group_id: int) -> None:
        """Note that a group's rows are written: it is in the queue."""
        self._seen.add(group_id // self._controllers)
        self._lost.pop(group_id, None)

    def remove_row(self, group_id: int) -> None:
        """Discount a row of a group that has left or was withdrawn."""
        self._rows[group_id] -= 1
        if not self._rows[group_id]:
            del self._rows[group_id]
            if group_id not in self._lost:
                self.remade.pop(group_id, None)

    def lose(self, group: LostGroup) -> None:
        """Note that a group has to be put again."""
        self._lost[group.group_id] = group

    def remake(self, group_id: int) -> None:
        """Count that a group is put again with other rows."""
        self.remade[group_id] = self.remade.get(group_id, 0) + 1

    def consumed_before(self, row: RowHeader, last: Sequence[int]) -> dict[int, int]:
        """The tasks that consumed a row before its group was lost and do not get it again; each with lease 0.

        `last`: the tasks whose outputs no task reads.
        """
        if row.group_id not in self._lost:
            return {}
        return dict.fromkeys(self._lost[row.group_id].left.get(row.order, last), 0)


class Intervals:
    """A set of integers that only grows, kept as ranges: integers that come nearly in sequence cost nearly nothing."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """`ranges`: (start, end) pairs, ascending and with gaps between them; the end is not included."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, number: int) -> bool:
        """Whether `number` was added."""
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._ends[place]

    def add(self, number: int) -> None:
        """Add a number; harmless where it was added before."""
        place = bisect_right(self._starts, number)
        if place and number < self._ends[place - 1]:
            return
        joins_left = place > 0 and self._ends[place - 1] == number
        joins_right = place < len(self._starts) and self._starts[place] == number + 1
        if joins_left and joins_right:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif joins_left:
            self._ends[place - 1] += 1
        elif joins_right:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number + 1)

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges, as `__init__` takes them."""
        return list(zip(self._starts, self._ends, strict=True))
