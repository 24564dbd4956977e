"""The sequences of a replica that wait."""

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from tailrace.engine.scheduling.sequence import Sequence
from tailrace.planning.replicas import handed_on


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

        Which ones, `handed_on` says. `here`: the groups that have a running sequence on this replica.
        """
        taken = handed_on(
            (sequence for _, sequence in sorted(self._heap, reverse=True)),
            count,
            here=here,
            group_of=lambda sequence: sequence.request.group_id,
            has_begun=lambda sequence: bool(sequence.log_probs),
        )
        self.remove(taken)
        return sorted(taken, key=attrgetter("order"))
