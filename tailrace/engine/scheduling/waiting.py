"""The sequences of a replica that wait."""

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from tailrace.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """The sequences that have not begun, or were preempted. The order is by priority, then arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._heap)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place in the order."""
        heappush(self._heap, (sequence.order, sequence))

    def pop(self) -> Sequence:
        """Remove and return the first sequence in the order."""
        return heappop(self._heap)[1]

    def remove(self, leaving: Collection[Sequence]) -> None:
        """Remove the `leaving` sequences."""
        if leaving:
            gone = set(leaving)
            self._heap = [entry for entry in self._heap if entry[1] not in gone]
            heapify(self._heap)

    def take_groups(self, count: int, *, here: Collection[int]) -> list[Sequence]:
        """Remove up to `count` sequences, whole groups where possible. They are returned in order.

        Groups outside `here` go first, and the later in the order the sooner. Sequences with a response go last, since
        the cache may have some of it left. Fewer come back where the next group would be split.

        here: The groups that have a running sequence on this replica.
        """
        groups: dict[tuple[bool, int], list[Sequence]] = {}
        for _, sequence in sorted(self._heap, reverse=True):
            groups.setdefault((bool(sequence.log_probs), sequence.request.group_id), []).append(sequence)
        preferred = sorted(groups, key=lambda key: (key[0], key[1] in here))
        taken: list[Sequence] = []
        for begun, group_id in preferred:
            if taken and (begun or group_id in here):
                break
            group = groups[begun, group_id]
            if len(taken) + len(group) <= count:
                taken += group
        if not taken and preferred:
            taken = groups[preferred[0]][:count]
        self.remove(taken)
        return sorted(taken, key=attrgetter("order"))
