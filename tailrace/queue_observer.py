"""What the queue holds, as events: for the display, the report and the metrics."""

import asyncio
from contextlib import suppress

from tailrace.errors import QueueClosed
from tailrace.events import Event, EventLog
from tailrace.transfer.queue.base import QueueStats, TransferQueue


class QueueObserver:
    """A service that emits one event `queue` every so many seconds."""

    def __init__(self, queue: TransferQueue, log: EventLog, every_s: float) -> None:
        self._queue = queue
        self._log = log
        self._every_s = every_s

    async def run(self) -> None:
        """Observe until the queue is closed, which is noticed when the next event is due.

        Raises:
            QueueError: the queue does not answer.
        """
        with suppress(QueueClosed):  # its processes have been given up
            while not (stats := await self._queue.stats()).closed:
                now = self._log.now()
                self._log.emit(Event(task="queue", actor="driver", start=now, end=now, metrics=queue_metrics(stats)))
                await asyncio.sleep(self._every_s)


def queue_metrics(stats: QueueStats) -> dict[str, float]:
    """`ready/<task>`, `leased/<task>` and `waiting/<task>` rows, and the `rows` and `bytes` that are stored."""
    by_state = {
        f"{state}/{name}": float(getattr(task, state))
        for state in ("ready", "leased", "waiting")
        for name, task in stats.tasks.items()
    }
    return {**by_state, "rows": float(stats.rows), "bytes": float(stats.bytes)}
