"""What the pool and its workers say to each other: msgpack, each message behind its length in 4 bytes.

pool → worker   Setup, then Call, Call, …
worker → pool   Ready, then one Reply for each call; in any order where the grader is asynchronous
"""

import struct
from typing import Any, BinaryIO, TypeVar

import msgspec

from tailrace.rewards.base import Grade, GradingRequest

LENGTH = struct.Struct(">I")

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


def frame(message: Any) -> bytes:
    """`message` as it goes over a pipe."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read(pipe: BinaryIO, kind: type[Message]) -> Message | None:
    """The next message, or None at the end of the input."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = pipe.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None
