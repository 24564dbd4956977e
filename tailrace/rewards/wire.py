"""The messages between the pool and its workers, in frames (tailrace/host/frames.py).

pool → worker   Setup, then Call, Call, …
worker → pool   Ready, then for each call Spent as often as it spends, and one Reply; calls in any order if the grader
                is asynchronous
"""

from collections.abc import Mapping
from typing import Any, BinaryIO, TypeVar

import msgspec

from tailrace.host.frames import read_frame
from tailrace.rewards.base import Grade, GradingRequest

Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True):
    """The first message of the pool."""

    grader: Mapping[str, Any]
    """The grader's configuration by its keys. It has been checked, and everything in it can be written as JSON."""
    key: str
    """Its key in the recipe, for messages."""
    timeout_s: float
    """The time limit of one grading by an asynchronous grader. The pool itself times other graders."""


class Ready(msgspec.Struct, frozen=True):
    """The first message of a worker."""

    error: str | None = None
    """The reason why the worker has no grader, if it has none."""
    concurrency: int = 1
    """The number of concurrent calls that the worker takes."""


class Call(msgspec.Struct, frozen=True):
    """Responses to grade together; mostly there is one."""

    number: int
    """The number of the call; its reply has the same number."""
    requests: list[GradingRequest]
    is_check: bool = False
    """Whether to check that any response can be right; see `Grader.can_be_right`."""


class Spent(msgspec.Struct, frozen=True, tag=True):
    """What a call has just spent, told at once: a process may die before its reply."""

    number: int
    amounts: Mapping[str, float]
    """By name."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The result of a call."""

    number: int
    grades: list[Grade]
    """In the order of the requests."""


Answer = Spent | Reply
"""What a worker sends after `Ready`."""


def read(pipe: BinaryIO, kind: type[Message]) -> Message | None:
    """Read the next message; return None at the end of the input."""
    body = read_frame(pipe)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)
