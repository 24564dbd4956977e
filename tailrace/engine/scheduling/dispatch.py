"""Chooses the replica of a request: that of its group, whose prompt it shares, or else the one with the least to do."""

from collections.abc import Sequence

from tailrace.engine.scheduling.scheduler import Scheduler
from tailrace.types import Request


class Dispatcher:
    """Shares requests out among the replicas' schedulers, and again when one of them has nothing left to start."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers
        self._last_group: dict[int, int] = {}
        """The group that each scheduler was last given. The samples of a group follow one another."""

    def choose(self, request: Request) -> Scheduler:
        """Choose the scheduler to add `request` to."""
        for index, group in self._last_group.items():
            if group == request.group_id:
                return self._schedulers[index]
        index = min(range(len(self._schedulers)), key=lambda i: self._load(self._schedulers[i]))
        self._last_group[index] = request.group_id
        return self._schedulers[index]

    def balance(self) -> None:
        """Give schedulers without a waiting sequence some that wait at the busiest scheduler."""
        for idle in self._schedulers:
            if idle.waiting:
                continue
            busiest = max(self._schedulers, key=self._load)
            surplus = (self._load(busiest) - self._load(idle)) // 2
            if surplus > 0 and busiest.waiting:
                idle.give(busiest.take_waiting(surplus))

    @staticmethod
    def _load(scheduler: Scheduler) -> int:
        return scheduler.running + scheduler.waiting
