"""Messages between a process and its children, in MessagePack. The length of each precedes it, in 4 bytes."""

import struct
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

if TYPE_CHECKING:
    from asyncio import StreamReader

LENGTH = struct.Struct(">I")
"""The length of the message that follows, in bytes."""

MOST_BYTES = 2**32 - 2**20
"""Bytes of arrays in one message at most."""


def frame(message: Any) -> bytes:
    """Encode `message` with its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(pipe: BinaryIO) -> bytes | None:
    """Read the next message, undecoded. Return None at the end of the pipe, even in the middle of a message."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = pipe.read(length)
    return body if len(body) == length else None


async def receive_frame(reader: "StreamReader") -> bytes:
    """Read the next message, undecoded.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other end has hung up.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)
