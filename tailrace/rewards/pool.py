"""Grades responses in worker processes that may loop, crash or print without harm.

    grade() ── waits for an idle slot ──▶ worker process ── Grade ──▶ caller
       ▲                                      │ too late, died, cancelled: killed with its process group
       └────── the slot is idle again ◀───────┘ and started anew by the slot's next grading

Who waits on whom: a grading waits for one of `workers` slots, first come first served; a slot is held for at most the
start limit and the time limit per attempt, so every grading ends. A worker serves one request at a time.
"""

import asyncio
from types import TracebackType
from typing import Self

from tailrace.config.rewards import RewardsConfig
from tailrace.errors import RewardError, UserError
from tailrace.rewards.base import CORRECT, Grade, GradingRequest
from tailrace.rewards.process import GraderDied, GraderProcess


class _Slot:
    """A place for one worker, which may be dead until the slot's next grading."""

    worker: GraderProcess | None = None


class GraderPool:
    """Worker processes for one grader: `async with GraderPool(config) as pool: grade = await pool.grade(request)`."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._slots = [_Slot() for _ in range(config.workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._closed = False

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
            self._check_open()  # it may have been closed while this waited
            for _ in range(1 + self._config.retries):
                grade = self._judged(await self._attempt(slot, request))
                if grade.error is None:
                    break
                self._check_open()  # it may have died by the hand of close
        finally:
            self._idle.put_nowait(slot)
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

    async def _attempt(self, slot: _Slot, request: GradingRequest) -> Grade:
        limit_s = self._config.timeout_s
        try:
            worker = await self._worker_of(slot)
            return await worker.grade(request, limit_s)
        except TimeoutError:
            return Grade(reward=None, error=f"timeout: grading took longer than {limit_s:g} s")
        except GraderDied as error:
            return Grade(reward=None, error=str(error))
        except UserError as error:
            return Grade(reward=None, error=f"died: it cannot start again: {error}")

    def _judged(self, grade: Grade) -> Grade:
        """With the word on whether it is right that the configuration says, where it does."""
        threshold = self._config.correct_at
        if threshold is None or grade.reward is None:
            return grade
        parts = {**grade.parts, CORRECT: float(grade.reward >= threshold)}
        return Grade(reward=grade.reward, parts=parts)

    async def _worker_of(self, slot: _Slot) -> GraderProcess:
        if slot.worker is None or not slot.worker.alive:
            slot.worker = await GraderProcess.spawn()
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
    return UserError(f"rewards.grader: at the start its process {cause}") if isinstance(cause, GraderDied) else cause
