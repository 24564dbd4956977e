"""The loop that every small task shares: claim, compute, ack, until the queue is closed.

When a claim's lease has ended meanwhile, its outputs are discarded: its rows come again, to this worker or another.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from tailrace.events import Event
from tailrace.tasks.context import TaskContext
from tailrace.transfer.queue.base import Claim, RowId
from tailrace.transfer.queue.holding import VOID, ack_if_held, held, next_claim
from tailrace.types import Value


class Service(Protocol):
    """A part of a run that serves until the queue is closed."""

    async def run(self) -> None:
        """Serve until the queue is closed."""


Outputs = Mapping[RowId, Mapping[str, Value]]


class Task(ABC):
    """A task of an algorithm's table, running."""

    def __init__(
        self,
        context: TaskContext,
        name: str,
        *,
        actor: str | None = None,
        workers: int = 1,
        rows: int | None = None,
    ) -> None:
        """`name`: the task's name in the table; its part before a dot is the kind of its events.

        `actor`: its row in the timeline, by default `name`.

        `workers`: the number of claims that are computed at the same time. `rows`: the most rows of a claim, for a
        policy that gathers as many.
        """
        self._name = name
        self._queue = context.queue
        self._log = context.log
        self._activity = context.activity
        self._samples_per_step = context.samples_per_step
        self._actor = actor or name
        self._workers = workers
        self._rows = rows

    async def run(self) -> None:
        """Serve until the queue is closed."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._workers):
                workers.create_task(self._serve())

    async def _serve(self) -> None:
        while (claim := await self._claim()) is not None:
            step = claim.rows[0].order // self._samples_per_step
            kind = self._name.partition(".")[0]
            with self._log.span(kind, self._actor, step=step, samples=len(claim.rows)) as span:
                async with held(self._queue, claim):
                    outputs = await self.compute(claim, span)
                    if not await ack_if_held(self._queue, claim, outputs):
                        span.info = {**span.info, **VOID}

    async def _claim(self) -> Claim | None:
        with self._activity.waiting("data"):
            return await next_claim(self._queue, self._name, limit=self._rows)

    @abstractmethod
    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """Compute the output cells of every row of `claim`. May add to `span`, the event of this computation."""
