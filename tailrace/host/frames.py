"""Messages between a process and its children: MessagePack, each behind its length in 4 bytes."""

import struct
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

if TYPE_CHECKING:
    from asyncio import StreamReader

LENGTH = struct.Struct(">I")
"""Of what follows it, in bytes."""


def frame(message: Any) -> bytes:
    """`message` as it is sent."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next message, yet to be decoded; None at the end of the pipe, be it in the middle of a message."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = pipe.read(length)
    return body if len(body) == length else None


async def receive_frame(reader: "StreamReader") -> bytes:
    """The next message, yet to be decoded.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other end has hung up.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)
