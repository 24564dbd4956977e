"""Grades responses in worker processes that may loop, crash or print without harm.

    grade() ── waits for an idle slot ──▶ worker process ── Grade ──▶ caller
       ▲                                      │ too late, died, cancelled: killed with its process group
       └────── the slot is idle again ◀───────┘ and started anew by the slot's next grading

Who waits on whom: a grading waits for one of `workers` slots, first come first served; a slot is held for at most the
start limit and the time limit per attempt, so every grading ends. A worker serves one request at a time.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tailrace.config.rewards import RewardsConfig
from tailrace.errors import RewardError, UserError
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.process import WorkerDied, WorkerProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Gradings since the start, by their outcome; retries are not counted."""

    graded: int = 0
    timeouts: int = 0
    died: int = 0
    errors: int = 0
    """The grader raised, or returned no finite number."""

    @property
    def failed(self) -> int:
        """Gradings that gave no reward."""
        return self.timeouts + self.died + self.errors


class _Slot:
    """A place for one worker, which may be dead until the slot's next grading."""

    worker: WorkerProcess | None = None


class GraderPool:
    """Worker processes for one grader: `async with GraderPool(config) as pool: grade = await pool.grade(request)`."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._slots = [_Slot() for _ in range(config.workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._counts: Counter[str] = Counter()
        self._closed = False

    @property
    def stats(self) -> PoolStats:
        """Counts so far."""
        return PoolStats(**self._counts)

    async def __aenter__(self) -> Self:
        """Start the workers.

        Raises:
            UserError: the grader cannot be made, or its process dies or hangs at the start.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(self._worker_of(slot))
        except BaseException as error:
            await self.close()
            raise _cause(error) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def grade(self, request: GradingRequest) -> Grade:
        """The grade of `request`, after the configured retries. A grader's failures are in `Grade.error`.

        Raises:
            RewardError: the pool is closed.
        """
        self._check_open()
        slot = await self._idle.get()
        try:
            for _ in range(1 + self._config.retries):
                self._check_open()
                outcome, grade = await self._attempt(slot, request)
                if outcome == "graded":
                    break
            if outcome == "died":
                self._check_open()  # by the hand of close
        finally:
            self._idle.put_nowait(slot)
        self._counts[outcome] += 1
        return grade

    async def close(self) -> None:
        """Kill the workers; gradings under way raise RewardError. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(slot.worker.kill() for slot in self._slots if slot.worker is not None))
        for _ in self._slots:  # once each slot has come back, no grading is left that could have started a process
            await self._idle.get()
        for slot in self._slots:  # let the gradings that still wait for one see that the pool is closed
            self._idle.put_nowait(slot)

    async def _attempt(self, slot: _Slot, request: GradingRequest) -> tuple[str, Grade]:
        limit_s = self._config.timeout_s
        try:
            worker = await self._worker_of(slot)
            grade = await worker.grade(request, limit_s)
        except TimeoutError:
            return "timeouts", Grade(reward=None, error=f"timeout: grading took longer than {limit_s:g} s")
        except WorkerDied as error:
            return "died", Grade(reward=None, error=str(error))
        except UserError as error:
            return "died", Grade(reward=None, error=f"died and cannot start again: {error}")
        return ("graded" if grade.error is None else "errors"), grade

    async def _worker_of(self, slot: _Slot) -> WorkerProcess:
        if slot.worker is None or not slot.worker.alive:
            slot.worker = await WorkerProcess.spawn()
            if self._closed:
                await slot.worker.kill()
            await slot.worker.prepare(self._config.grader)
        return slot.worker

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("the grader pool is closed")


def _cause(error: BaseException) -> BaseException:
    """The user's error behind a failed start, out of the task group's wrapping."""
    cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
    return UserError(f"rewards.grader: its process {cause} at the start") if isinstance(cause, WorkerDied) else cause
