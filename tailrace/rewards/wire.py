"""What the pool and its workers say to each other: msgpack, each message behind its length in 4 bytes.

pool → worker   the grader's configuration (JSON), then GradingRequest, GradingRequest, …
worker → pool   Ready, then one Grade for each request, in order
"""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct(">I")


class Ready(msgspec.Struct, frozen=True):
    """The first word of a worker."""

    error: str | None = None
    """Why it has no grader."""


def frame(message: Any) -> bytes:
    """`message` as it goes over a pipe."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
