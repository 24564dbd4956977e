"""Periodic events about the queue's contents and this process, for the display, the report and the metrics."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tailrace.errors import QueueClosed, QueueTimeout
from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind
from tailrace.registers.queue import QUEUE_COUNTS, TASK_COUNTS
from tailrace.transfer.queue.base import QueueStats, TransferQueue


class Observer:
    """A service that emits an event `queue`, and the events of this process, every `every_s` seconds."""

    def __init__(
        self, queue: TransferQueue, log: EventLog, tell: Callable[[], None] | None = None, *, every_s: float = 1.0
    ) -> None:
        """`tell`: emits the events about the pools in this process, if there are any."""
        self._tell = tell
        self._queue = queue
        self._log = log
        self._every_s = every_s

    async def run(self) -> None:
        """Observe until the queue is closed; the last event is of that moment.

        Raises:
            QueueError: the queue does not answer.
        """
        with suppress(QueueClosed):  # its processes have been given up
            while not await self._look():
                with suppress(QueueTimeout, QueueClosed):
                    await self._queue.lost_groups(timeout=self._every_s)  # ends with the queue, which a sleep would not
                    await asyncio.sleep(self._every_s)  # the groups stay lost until another service has put them again

    async def _look(self) -> bool:
        """Emit the events; return whether the queue is closed."""
        stats = await self._queue.stats()
        now = self._log.now()
        if self._tell is not None:
            self._tell()
        self._log.emit(Event(task=EventKind.QUEUE, actor="driver", start=now, end=now, metrics=queue_metrics(stats)))
        return stats.closed


def queue_metrics(stats: QueueStats) -> dict[str, float]:
    """The counts in a `queue` event. Those of a task are named `<count>/<task>`."""
    by_task = {
        f"{count.name}/{name}": float(getattr(task, count.name))
        for count in TASK_COUNTS
        if count.observed
        for name, task in stats.tasks.items()
    }
    return by_task | {count.name: float(getattr(stats, count.name)) for count in QUEUE_COUNTS if count.observed}
