"""Concurrent gradings in one process, for graders that wait for a service, a model or a database.

Each grading has a time limit, at which it is cancelled. If it does not end then, the pool kills the process.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from tailrace.rewards.base import AsyncGrader, Grade, GradingRequest
from tailrace.rewards.results import all_graded, failed
from tailrace.rewards.spending import begin_grading
from tailrace.rewards.wire import Answer, Call, Reply, Spent, read

Write = Callable[[Answer], None]


def serve_together(grader: AsyncGrader, requests: BinaryIO, write: Write, limit_s: float) -> None:
    """Answer each call as soon as its grading has ended, until the input ends. The pool bounds the number of calls."""
    asyncio.run(_serve(grader, requests, write, limit_s))


async def _serve(grader: AsyncGrader, requests: BinaryIO, write: Write, limit_s: float) -> None:
    worker = os.getpid()

    async def answer(call: Call) -> None:
        begin_grading(lambda amounts: write(Spent(call.number, amounts)))
        grades = await _grades(grader, call.requests, limit_s)
        if os.getpid() != worker:  # the grader has forked, and its child came back, too
            os._exit(0)
        write(Reply(call.number, grades))

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "calls") as reader:  # the loop's own threads are the grader's, and may all be busy
        async with asyncio.TaskGroup() as gradings:
            while (call := await loop.run_in_executor(reader, read, requests, Call)) is not None:
                gradings.create_task(answer(call))
    await grader.close()


async def _grades(grader: AsyncGrader, requests: Sequence[GradingRequest], limit_s: float) -> list[Grade]:
    try:
        async with asyncio.timeout(limit_s) as limit:
            return all_graded(await grader.grade_all(requests), len(requests))
    except BaseException as error:  # graders may raise anything, SystemExit for one; the pool counts it
        if limit.expired() and isinstance(error, TimeoutError):
            return [too_late(limit_s)] * len(requests)
        return failed(error, len(requests))


def too_late(limit_s: float) -> Grade:
    """The grade of a grading that took longer than `limit_s`."""
    return Grade(reward=None, error=f"timeout: grading took longer than {limit_s:g} s")
