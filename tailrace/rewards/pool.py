"""Grades responses in worker processes that may loop, crash or print without harm.

    grade() ── waits for a place ──▶ worker process ── Grade ──▶ caller
       ▲                                   │ too late, died, cancelled: killed with all that its grader has started
       └───── the place is free again ◀────┘ and restarted by the slot's next grading

    grade() ── joins the line ──▶ up to `batch_size` that wait when a place is free, in one call: reward models

Waiting: a grading waits for a place in one of `workers` slots, first come first served. It holds the place for at most
the start limit and the time limit per attempt, so every grading ends. A slot has one place. With an asynchronous grader
it has as many places as the grader takes gradings at a time.
"""

import asyncio
import os
import warnings
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import msgspec
import psutil

from tailrace.config.base import GIB
from tailrace.config.rewards import (
    FunctionReward,
    GivenReward,
    GradingConfig,
    GroupFunctionReward,
    JudgeReward,
    RewardsConfig,
    grader_key,
)
from tailrace.errors import RewardError, TailraceWarning, UserError
from tailrace.rewards.base import CORRECT, Grade, GradingRequest
from tailrace.rewards.output import Printed
from tailrace.rewards.process import GraderDied, GraderProcess
from tailrace.rewards.spending import with_spent
from tailrace.rewards.together import too_late

_WORKER_BYTES = 40 * 2**20
"""The least memory of a worker: Python with this package."""


class _Slot:
    """A slot for one worker, which may be dead until the slot's next grading."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker: GraderProcess | None = None
        self.starting = asyncio.Lock()


class GraderPool:
    """Worker processes for one grader: `async with GraderPool(config) as pool: grade = await pool.grade(request)`."""

    def __init__(self, config: GradingConfig, name: str = "") -> None:
        """`name`: see `RewardsConfig.each`. It stands before the kind of each failure, as in `judge.timeout: …`."""
        self._config = config
        self._name = name
        self._slots = [_Slot(f"{name or 'grader'}-{number}") for number in range(config.workers)]
        self._places: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._places.put_nowait(slot)
        self._count = config.workers
        """The number of places."""
        self._closed = False
        self._printed = Printed()
        self._starts = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        """Limits concurrent starts: more of them would only take turns at the cores."""
        self.capacity = _capacity(config)
        """The number of concurrent gradings that keep the workers busy."""
        self._line: deque[tuple[GradingRequest, asyncio.Future[Grade]]] = deque()
        """Gradings that wait for a batch."""
        self._batches: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Start the workers.

        Raises:
            UserError: the grader cannot be made, or its process dies or hangs at the start.
        """
        _check_room(self._config.workers, self._name)
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._worker_of(slot)) for slot in self._slots]
        except BaseException as error:
            await self.close()
            raise self._cause(error) from None
        concurrency = workers[0].result().concurrency
        for slot in self._slots * (concurrency - 1):
            self._places.put_nowait(slot)
        self._count *= concurrency
        self.capacity *= concurrency
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def grade(self, request: GradingRequest) -> Grade:
        """The grade of `request`; see `grade_all`."""
        if self._config.batch_size > 1:
            return await self._in_batch(request)
        (grade,) = await self.grade_all([request])
        return grade

    async def grade_all(self, requests: Sequence[GradingRequest]) -> list[Grade]:
        """The grades of responses that are graded together, after the configured retries; failures are in their errors.

        A time limit is for all of them. Those of a group are tried again together where one has failed.

        Raises:
            RewardError: the pool is closed.
        """
        self._check_open()
        async with self._place() as slot:
            return await self._graded(slot, requests)

    async def can_be_right(self, request: GradingRequest) -> Grade:
        """Ask `Grader.can_be_right`. The grade's reward is 1 or 0, or its error says why no response can be right.

        Raises:
            RewardError: the pool is closed.
        """
        async with self._place() as slot:
            (grade,) = await self._attempt(slot, [request], Counter(), is_check=True)
            return grade

    async def close(self) -> None:
        """Kill the workers; gradings under way raise RewardError. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(slot.worker.kill() for slot in self._slots if slot.worker is not None))
        # once each place has come back, no grading is left that could start a process
        places = [await self._places.get() for _ in range(self._count)]
        for slot in places:  # let the gradings that still wait for one see that the pool is closed
            self._places.put_nowait(slot)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[_Slot]:
        """Wait for a place and hold it."""
        slot = await self._places.get()
        try:
            self._check_open()  # it may have been closed while this waited
            yield slot
        finally:
            self._places.put_nowait(slot)

    async def _in_batch(self, request: GradingRequest) -> Grade:
        """Grade `request` with others that wait. A caller that is cancelled takes none of them with it."""
        self._check_open()
        grade: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        self._line.append((request, grade))
        task = asyncio.create_task(self._grade_batch())
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)
        return await grade

    async def _grade_batch(self) -> None:
        """Grade those that wait when there is a place, if no batch before has taken them all."""
        batch: list[tuple[GradingRequest, asyncio.Future[Grade]]] = []
        try:
            async with self._place() as slot:
                while self._line and len(batch) < self._config.batch_size:
                    asked = self._line.popleft()
                    if not asked[1].cancelled():
                        batch.append(asked)
                grades = await self._graded(slot, [request for request, _ in batch]) if batch else []
        except Exception as error:  # of whatever kind: without it the callers would wait for ever
            batch = batch or [self._line.popleft() for _ in range(len(self._line))]
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), grade in zip(batch, grades, strict=True):
            if not future.done():  # otherwise its caller was cancelled
                future.set_result(grade)

    async def _graded(self, slot: _Slot, requests: Sequence[GradingRequest]) -> list[Grade]:
        """Try again where some have failed: all of a group, and those alone of a batch."""
        spent: Counter[str] = Counter()
        grades: dict[int, Grade] = {}
        asked = everyone = list(range(len(requests)))
        for _ in range(1 + self._config.retries):
            attempt = await self._attempt(slot, [requests[number] for number in asked], spent)
            grades |= dict(zip(asked, map(self._judged, attempt), strict=True))
            failed = [number for number, grade in grades.items() if grade.error is not None]
            if not failed:
                break
            self._check_open()  # `close` may have killed it
            asked = everyone if self._config.sees_groups else failed
        return with_spent(list(grades.values()), {self._named(what): amount for what, amount in spent.items()})

    async def _attempt(
        self, slot: _Slot, requests: Sequence[GradingRequest], spent: Counter[str], *, is_check: bool = False
    ) -> list[Grade]:
        limit_s = self._config.timeout_s
        try:
            worker = await self._worker_of(slot)
            return await worker.grade(requests, limit_s, spent, is_check=is_check)
        except TimeoutError:
            failure = too_late(limit_s)
        except GraderDied as error:
            failure = Grade(reward=None, error=str(error))
        except UserError as error:
            failure = Grade(reward=None, error=f"died: it cannot start again: {error}")
        return [failure] * len(requests)

    def _judged(self, grade: Grade) -> Grade:
        """Add whether the response is right, if the configuration has a threshold of the reward for it.

        Put the name of the reward before an error.
        """
        if grade.error is not None:
            return msgspec.structs.replace(grade, error=self._named(grade.error))
        threshold = self._config.correct_at
        if threshold is None or grade.reward is None:
            return grade
        parts = {**grade.parts, CORRECT: float(grade.reward >= threshold)}
        return msgspec.structs.replace(grade, parts=parts)

    def _named(self, what: str) -> str:
        """Put the name of the reward before `what`, where it has one."""
        return f"{self._name}.{what}" if self._name else what

    async def _worker_of(self, slot: _Slot) -> GraderProcess:
        async with slot.starting:
            if slot.worker is None or not slot.worker.alive:
                async with self._starts:
                    slot.worker = await GraderProcess.spawn(self._printed.of(slot.name))
                    if self._closed:
                        await slot.worker.kill()
                    await slot.worker.prepare(self._config, grader_key(self._name))
            return slot.worker

    def _cause(self, error: BaseException) -> BaseException:
        """Take the user's error behind a failed start out of the task group's error."""
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, GraderDied):
            return UserError(f"{grader_key(self._name)}: at the start its process {cause}")
        return cause

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("the grader pool is closed")


async def capacity_of(config: RewardsConfig) -> int:
    """The number of responses that all pools of `config` can grade at a time: the least `capacity` of a pool.

    Only a function itself knows whether it is asynchronous. A process finds out, and ends at once. A function that
    cannot be called here counts as a plain one, with a warning.
    """
    return min([await _capacity_of(grading, name) for name, grading in config.each.items()])


async def _capacity_of(config: GradingConfig, name: str) -> int:
    if isinstance(config.grader, JudgeReward):
        return config.workers * config.grader.concurrency
    if not isinstance(config.grader, FunctionReward | GroupFunctionReward | GivenReward):
        return _capacity(config)
    try:
        async with GraderPool(config.model_copy(update={"workers": 1}), name) as pool:
            return config.workers * pool.capacity
    except UserError as error:
        warnings.warn(
            f"{error}; so it counts as a function without `async`: {config.workers} gradings at a time "
            f"({_workers(name)})",
            TailraceWarning,
            stacklevel=3,
        )
        return config.workers


def _capacity(config: GradingConfig) -> int:
    """The number of gradings that keep the workers busy, where a worker takes one call at a time.

    With batches as many wait as are scored, so that the next batch is full when a worker comes back.
    """
    return config.workers * (2 * config.batch_size if config.batch_size > 1 else 1)


def _check_room(workers: int, name: str) -> None:
    available = psutil.virtual_memory().available
    if workers * _WORKER_BYTES > available:
        raise UserError(
            f"{_workers(name)} {workers} would take about {workers * _WORKER_BYTES / GIB:.1f} GiB, and "
            f"{available / GIB:.1f} GiB are free; lower it"
        )


def _workers(name: str) -> str:
    """The key that says how many processes the grader of a reward has."""
    return f"{grader_key(name).rpartition('.')[0]}.workers"
