"""What the pool and its workers say to each other, in frames (tailrace/host/frames.py).

pool → worker   Setup, then Call, Call, …
worker → pool   Ready, then one Reply for each call; in any order where the grader is asynchronous
"""

from typing import BinaryIO, TypeVar

import msgspec

from tailrace.host.frames import read_frame
from tailrace.rewards.base import Grade, GradingRequest

Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True):
    """The first word of the pool."""

    grader: str
    """Its configuration, as JSON."""
    timeout_s: float
    """For one grading of an asynchronous grader; others are timed by the pool."""


class Ready(msgspec.Struct, frozen=True):
    """The first word of a worker."""

    error: str | None = None
    """Why it has no grader."""
    concurrency: int = 1
    """Calls that it takes at a time."""


class Call(msgspec.Struct, frozen=True):
    """A response to grade."""

    number: int
    """Of the call; its reply has the same."""
    request: GradingRequest
    is_check: bool = False
    """It is asked whether any response can be right; see `Grader.can_be_right`."""


class Reply(msgspec.Struct, frozen=True):
    """What came of a call."""

    number: int
    grade: Grade


def read(pipe: BinaryIO, kind: type[Message]) -> Message | None:
    """The next message, or None at the end of the input."""
    body = read_frame(pipe)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)
