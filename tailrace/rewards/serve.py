"""A grading process: `python -m tailrace.rewards.serve`, started by the pool.

It reads calls from its standard input, answers on its standard output, and ends when its input does. Before a grader is
loaded, both pipes move to other descriptors, so that the grader's prints go to standard error, and a guard becomes the
parent (guard.py). One call is worked on at a time, and the pool limits its time by killing this process. An
asynchronous grader works on several calls, each with its own limit (together.py).
"""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, BinaryIO, cast

from tailrace.errors import UserError
from tailrace.host.frames import frame
from tailrace.host.streams import replace_unencodable
from tailrace.host.user_code import describe
from tailrace.rewards.base import AsyncGrader, Grade, Grader, GradingRequest
from tailrace.rewards.factory import make_grader
from tailrace.rewards.guard import fork_worker
from tailrace.rewards.results import all_graded, failed
from tailrace.rewards.spending import begin_grading
from tailrace.rewards.wire import Answer, Call, Ready, Reply, Setup, Spent, read

if TYPE_CHECKING:
    from tailrace.config.rewards import Grader as GraderConfig


def main() -> None:
    """Serve until the input ends."""
    requests, replies = _take_pipes()
    replace_unencodable()  # no text that a grader prints makes a grading fail
    fork_worker(requests.fileno())
    inherited = [requests.fileno(), replies.fileno()]
    os.register_at_fork(after_in_child=lambda: _close(inherited))
    setup = read(requests, Setup)
    if setup is None:
        return
    grader, ready = _load(setup)
    _write(replies, ready)
    if isinstance(grader, AsyncGrader):
        from tailrace.rewards.together import serve_together  # asyncio would take a quarter of each process's start

        serve_together(grader, requests, lambda answer: _write(replies, answer), setup.timeout_s)
    elif grader is not None:
        _serve(grader, requests, replies)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol's two pipes to descriptors that no program inherits; 0 becomes empty and 1 standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _close(descriptors: list[int]) -> None:
    """Close what a fork has inherited, once: in forks of it, others may have these numbers."""
    while descriptors:
        os.close(descriptors.pop())


def _load(setup: Setup) -> tuple[Grader | AsyncGrader | None, Ready]:
    # not read as a schema: importing those would take four fifths of the start
    config = cast("GraderConfig", SimpleNamespace(**setup.grader))
    try:
        grader = make_grader(config, setup.key)
    except UserError as error:
        return None, Ready(error=str(error))
    except BaseException as error:  # a user's module may raise anything while it is imported
        return None, Ready(error=f"{setup.key} cannot be made: {describe(error)}")
    return grader, Ready(concurrency=grader.concurrency if isinstance(grader, AsyncGrader) else 1)


def _serve(grader: Grader, requests: BinaryIO, replies: BinaryIO) -> None:
    worker = os.getpid()
    while (call := read(requests, Call)) is not None:
        _report_to(replies, call.number)
        grades = _checks(grader, call.requests) if call.is_check else _grades(grader, call.requests)
        if os.getpid() != worker:  # the grader has forked, and its child came back, too
            os._exit(0)
        _write(replies, Reply(call.number, grades))


def _report_to(replies: BinaryIO, number: int) -> None:
    """Report what a call spends."""
    begin_grading(lambda amounts: _write(replies, Spent(number, amounts)))


def _grades(grader: Grader, requests: Sequence[GradingRequest]) -> list[Grade]:
    try:
        return all_graded(grader.grade_all(requests), len(requests))
    except BaseException as error:  # graders may raise anything, SystemExit for one; the pool counts it
        return failed(error, len(requests))


def _checks(grader: Grader, requests: Sequence[GradingRequest]) -> list[Grade]:
    """Grade 1 if some response can be right, else 0; an error if the grader says why none can."""
    try:
        return [Grade(reward=float(grader.can_be_right(request))) for request in requests]
    except Exception as error:  # here the libraries of Tailrace's own graders raise it
        return failed(error, len(requests))


def _write(pipe: BinaryIO, message: Ready | Answer) -> None:
    pipe.write(frame(message))
    pipe.flush()


if __name__ == "__main__":
    main()
