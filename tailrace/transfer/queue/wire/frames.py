"""One message as ZeroMQ frames: a header, then raw bytes that are never copied.

    [ msgpack of (number, oldest, message) ] [ cells ] [ cells ] …

`number` counts the requests of a connection; an answer bears its request's. `oldest` is the smallest number whose
answer the sender still waits for: the server forgets what it kept for those before. Whatever the bytes, reading them
allocates no more than they are: msgspec grows with what is there, not with what a length says.
"""

import operator
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from tailrace.errors import WireError, one_line
from tailrace.transfer.queue.wire.messages import Answer, Request

T = TypeVar("T")

Buffer: TypeAlias = bytes | bytearray | memoryview
MAX_FRAME_BYTES = 2**30
"""Of one frame: sockets refuse a longer one before they make room for it."""
_NUMBER = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame, its message not looked at yet."""

    number: _NUMBER
    oldest: _NUMBER
    message: msgspec.Raw


class _Outgoing(msgspec.Struct, array_like=True):
    number: int
    oldest: int
    message: Request | Answer | msgspec.Raw


class Reply(NamedTuple):
    """An answer and the frames that came, or go, along."""

    answer: Answer
    frames: Sequence[Buffer] = ()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=operator.index)  # of integers that are not Python's own, as numpy's
_UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises for a value that has no form in msgpack: a foreign type, a number too big, bad Unicode."""
_HEADERS = msgspec.msgpack.Decoder(Header)
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_request(message: Request) -> msgspec.Raw:
    """A request as it travels, for `encode`.

    Raises:
        WireError: a field holds what cannot travel.
    """
    try:
        return msgspec.Raw(_ENCODER.encode(message))
    except _UNFIT as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {_unfit(message)}{one_line(error)}") from None


def _unfit(message: Request) -> str:
    """The first field that cannot be encoded, to begin a message with."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        try:
            _ENCODER.encode(value)
        except _UNFIT:
            return f"{name} {value!r:.80}: "
    return ""


def encode(
    number: int, oldest: int, message: Request | Answer | msgspec.Raw, frames: Sequence[Buffer] = ()
) -> list[Buffer]:
    """The frames of a message."""
    return [_ENCODER.encode(_Outgoing(number, oldest, message)), *frames]


def check_frames(frames: Sequence[Buffer]) -> None:
    """Whether frames can be sent along.

    Raises:
        WireError: one is longer than MAX_FRAME_BYTES.
    """
    for frame in frames:
        if (nbytes := memoryview(frame).nbytes) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {nbytes} bytes is longer than {MAX_FRAME_BYTES}; send fewer rows at once")


def decode_header(frame: Buffer) -> Header:
    """The header of a message.

    Raises:
        WireError: these bytes are none.
    """
    return _decode(_HEADERS, frame, "the header of a message")


def decode_request(header: Header) -> Request:
    """What is asked.

    Raises:
        WireError: no known request, or its fields are not as they must be.
    """
    return _decode(_REQUESTS, header.message, "a request")


def decode_answer(header: Header) -> Answer:
    """What is answered.

    Raises:
        WireError: no known answer, or its fields are not as they must be.
    """
    return _decode(_ANSWERS, header.message, "an answer")


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: Buffer | msgspec.Raw, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"{memoryview(data).nbytes} bytes are not {what}: {one_line(error)}") from None
