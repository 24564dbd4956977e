"""Shares requests out among the replicas of an engine, and again when one of them has nothing left to start.

A request goes to the replica of its group, whose prompt it shares, or else to the one with the least to do.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

Item = TypeVar("Item")


class Replica(Protocol):
    """A copy of the model, with sequences."""

    @property
    def running(self) -> int:
        """The number of sequences that run."""
        ...

    @property
    def waiting(self) -> int:
        """The number of sequences that wait."""
        ...

    def take_waiting(self, count: int) -> Sequence[Any]:
        """Hand over up to `count` waiting sequences; see `handed_on`."""
        ...

    def give(self, sequences: Iterable[Any]) -> None:
        """Have sequences of another replica wait, behind those of the same priority."""
        ...


AnyReplica = TypeVar("AnyReplica", bound=Replica)


class Dispatcher(Generic[AnyReplica]):
    """Chooses replicas."""

    def __init__(self, replicas: Sequence[AnyReplica]) -> None:
        self.replicas = replicas
        self._last_group: dict[int, int] = {}
        """The group that each replica was last given. The samples of a group follow one another."""

    def choose(self, group: int) -> AnyReplica:
        """Choose the replica of a request of a group."""
        for index, last in self._last_group.items():
            if last == group:
                return self.replicas[index]
        index = min(range(len(self.replicas)), key=lambda i: _load(self.replicas[i]))
        self._last_group[index] = group
        return self.replicas[index]

    def balance(self) -> bool:
        """Give replicas without a waiting sequence some that wait at the busiest one. Return whether any were given."""
        moved = False
        for idle in self.replicas if len(self.replicas) > 1 else ():
            if idle.waiting:
                continue
            busiest = max(self.replicas, key=_load)
            surplus = (_load(busiest) - _load(idle)) // 2
            if surplus > 0 and busiest.waiting:
                idle.give(busiest.take_waiting(surplus))
                moved = True
        return moved


def _load(replica: Replica) -> int:
    return replica.running + replica.waiting


def handed_on(
    latest_first: Iterable[Item],
    count: int,
    *,
    here: Collection[int],
    group_of: Callable[[Item], int],
    has_begun: Callable[[Item], bool],
) -> list[Item]:
    """Choose up to `count` waiting sequences that go on at another replica, whole groups where possible.

    Groups outside `here` go first, and the later in the order the sooner. Sequences with a response go last, since the
    cache may have some of it left. There are fewer where the next group would be split.

    Args:
        latest_first: the sequences that wait, the last in the order first.
        here: the groups that have a running sequence on this replica.
    """
    groups: dict[tuple[bool, int], list[Item]] = {}
    for sequence in latest_first:
        groups.setdefault((has_begun(sequence), group_of(sequence)), []).append(sequence)
    preferred = sorted(groups, key=lambda key: (key[0], key[1] in here))
    taken: list[Item] = []
    for begun, number in preferred:
        if taken and (begun or number in here):
            break
        group = groups[begun, number]
        if len(taken) + len(group) <= count:
            taken += group
    return taken if taken or not preferred else groups[preferred[0]][:count]
