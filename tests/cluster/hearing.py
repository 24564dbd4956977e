"""Reads the reports of a worker in the background."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol, Self

from tailrace.cluster.base import Report

LIMIT_S = 120.0


class Reporting(Protocol):
    """The handle of a worker, in its driver or its keeper."""

    def reports(self) -> AsyncIterator[Report]: ...


class Hearing:
    """The reports of a worker. Reading begins when this is made."""

    def __init__(self, handle: Reporting) -> None:
        self.tasks: list[str] = []
        self.lines: list[str] = []
        self.reports = 0
        self._news = asyncio.Condition()
        self.ended = asyncio.create_task(self._hear(handle))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ended.cancel()
        await asyncio.wait([self.ended])

    async def until(self, true: Callable[[Self], bool]) -> None:
        """Wait for reports that make `true` true."""
        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(lambda: true(self) or self.ended.done())
        assert true(self), (self.tasks, self.lines)

    async def end(self) -> None:
        """Wait until the reports end, and raise what ended them."""
        async with asyncio.timeout(LIMIT_S):
            await self.ended

    async def _hear(self, handle: Reporting) -> None:
        try:
            async for report in handle.reports():
                await self._take(report)
        finally:
            async with self._news:
                self._news.notify_all()

    async def _take(self, report: Report) -> None:
        self.reports += 1
        self.tasks += [event.task for event in report.events]
        self.lines += report.lines
        async with self._news:
            self._news.notify_all()
