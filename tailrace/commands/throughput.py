"""The speed of making samples, for people: a bar in a terminal, a line now and then in a log, and a last line."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tailrace.engine.base import EngineStats
from tailrace.errors import counted
from tailrace.report.text import duration, number
from tailrace.types import Sample

BAR_PERIOD_S = 0.5
LOG_PERIOD_S = 10.0


class Throughput:
    """Counts the samples of one batch of requests from the moment of its creation. Use it from the event loop alone."""

    def __init__(self, total: int, stats: Callable[[], EngineStats]) -> None:
        """Expect `total` samples from the engine that counts in `stats`, which is new."""
        self.samples = 0
        self.tokens = 0
        """Tokens of those samples."""
        self._total = total
        self._stats = stats
        self._start = time.perf_counter()
        self._first_s: float | None = None

    def count(self, sample: Sample) -> None:
        """Count a finished sample."""
        if self._first_s is None:
            self._first_s = self._elapsed
        self.samples += 1
        self.tokens += len(sample.response_ids)

    @asynccontextmanager
    async def shown(self, console: Console) -> AsyncIterator[None]:
        """Show the progress on `console` for as long as the block lasts."""
        showing = asyncio.create_task(self._draw(console) if console.is_interactive else self._log(console))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait([showing])
            if not showing.cancelled():  # it ends by itself only where it cannot draw
                showing.result()

    def summary(self) -> str:
        """Return one line about the samples made, their speed, and the work that they took."""
        stats = self._stats()
        first = "" if self._first_s is None else f" · first sample after {duration(self._first_s)}"
        switches = f" · TP changed {counted(stats.switches, 'time')}" if stats.switches else ""
        return (
            f"{counted(self.samples, 'sample')} · {counted(self.tokens, 'token')} in {duration(self._elapsed)} · "
            f"{number(self.tokens / self._elapsed)} tokens/s{first} · "
            f"prefill {counted(stats.prefilled_tokens, 'token')} computed, {stats.shared_tokens:,} shared · "
            f"{counted(stats.preemptions, 'preemption')}{switches}"
        )

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._start

    def _now(self) -> str:
        """Return the speed so far, unfinished samples included."""
        stats = self._stats()
        speed = number(stats.generated_tokens / self._elapsed)
        first = "" if self._first_s is None else f" · first after {duration(self._first_s)}"
        return f"{speed} tokens/s · {stats.running} running, {stats.waiting} waiting{first}"

    async def _log(self, console: Console) -> None:
        while True:
            await asyncio.sleep(LOG_PERIOD_S)
            line = f"{self.samples}/{counted(self._total, 'sample')} · {duration(self._elapsed)} · {self._now()}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    async def _draw(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(self._now(), total=self._total)
            while True:
                progress.update(bar, completed=self.samples, description=self._now())
                await asyncio.sleep(BAR_PERIOD_S)
