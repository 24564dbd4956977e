"""One grading process: `python -m tailrace.rewards.worker`, started by the pool.

It reads requests from its standard input and answers on its standard output, one at a time, and ends when its input
does. Before a grader is loaded, both pipes move to descriptors of their own, so that what a grader prints goes to
standard error. Time limits are the pool's: it kills the process group.

A pool that is killed leaves no worker behind, whatever the grader is doing: a thread waits for the other end of the
input to close, then kills the group; a grader that never gives up the interpreter's lock would stop that thread, and
dies by the kernel's parent-death signal (Linux). That signal may come before the thread has killed the programs that
the grader started; those end by themselves.
"""

import ctypes
import os
import select
import signal
import sys
import threading
from typing import BinaryIO, TypeVar

import msgspec
from pydantic import TypeAdapter

from tailrace.config.rewards import Grader as GraderConfig
from tailrace.errors import UserError, one_line
from tailrace.rewards.base import Grade, Grader, GradingRequest
from tailrace.rewards.factory import make_grader
from tailrace.rewards.results import read_result
from tailrace.rewards.wire import LENGTH, Ready, frame

Message = TypeVar("Message")

_PR_SET_PDEATHSIG = 1
_MAX_ERROR_CHARS = 500


def main() -> None:
    """Serve until the input ends."""
    requests, replies = _take_pipes()
    _die_with_pool(requests.fileno())
    config = _read(requests, bytes)
    if config is None:
        return
    grader, ready = _load(config)
    _write(replies, ready)
    while grader is not None and (request := _read(requests, GradingRequest)) is not None:
        _write(replies, _grade(grader, request))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's two pipes, on descriptors that no child inherits; 0 becomes empty and 1 becomes standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _die_with_pool(requests_fd: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_kill_group_on_hangup, args=(requests_fd,), daemon=True).start()


def _kill_group_on_hangup(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # reports a hang-up and nothing else: the requests are the main thread's
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _read(pipe: BinaryIO, kind: type[Message]) -> Message | None:
    """The next message, or None at the end of the input."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = pipe.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None


def _write(pipe: BinaryIO, message: Ready | Grade) -> None:
    pipe.write(frame(message))
    pipe.flush()


def _load(config: bytes) -> tuple[Grader | None, Ready]:
    try:
        grader_config: GraderConfig = TypeAdapter(GraderConfig).validate_json(config)
        return make_grader(grader_config), Ready()
    except UserError as error:
        return None, Ready(str(error))
    except Exception as error:  # a user's module may raise anything while it is imported
        return None, Ready(f"rewards.grader cannot be made: {_describe(error)}")


def _grade(grader: Grader, request: GradingRequest) -> Grade:
    try:
        reward, parts = read_result(grader.grade(request))
        return Grade(reward=reward, parts=parts)
    except Exception as error:  # graders may raise anything; the pool counts it
        return Grade(reward=None, error=_describe(error))


def _describe(error: Exception) -> str:
    """`ErrorName: message`, or the name alone, on one line of bounded length."""
    name, message = type(error).__name__, one_line(error)
    text = name if message == name else f"{name}: {message}"
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"


if __name__ == "__main__":
    main()
