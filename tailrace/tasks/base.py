"""The loop that every small task shares: claim, compute, ack, until the queue is closed.

What was computed for a claim that is void by then is thrown away: its rows come again, to this worker or another.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from tailrace.activity import Activity
from tailrace.events import Event, EventLog
from tailrace.transfer.queue.base import Claim, RowId, TransferQueue
from tailrace.transfer.queue.lease import VOID, ack_if_held, held, next_claim
from tailrace.types import Value

Outputs = Mapping[RowId, Mapping[str, Value]]


class Task(ABC):
    """One line of an algorithm's table, at work."""

    name: str
    """The task's name in the table."""
    actor: str
    """Its row in the timeline."""

    def __init__(
        self,
        queue: TransferQueue,
        log: EventLog,
        *,
        samples_per_step: int,
        workers: int = 1,
        activity: Activity | None = None,
    ) -> None:
        """`workers`: claims that are computed at the same time. `activity`: of the process, where nothing else tells it
        that it is busy.
        """
        self._busy: Callable[[], AbstractContextManager[None]] = nullcontext if activity is None else activity.busy
        self._queue = queue
        self._log = log
        self._samples_per_step = samples_per_step
        self._workers = workers

    async def run(self) -> None:
        """Serve until the queue is closed."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._workers):
                workers.create_task(self._serve())

    async def _serve(self) -> None:
        while (claim := await next_claim(self._queue, self.name)) is not None:
            step = claim.rows[0].order // self._samples_per_step
            with self._log.span(self.name, self.actor, step=step, samples=len(claim.rows)) as span:
                async with held(self._queue, claim):
                    with self._busy():
                        outputs = await self.compute(claim, span)
                    if not await ack_if_held(self._queue, claim, outputs):
                        span.info = {**span.info, **VOID}

    @abstractmethod
    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """The output cells of every row of `claim`; may add to the event of this span."""
