"""One message as ZeroMQ frames: a header, then raw bytes that are not copied, but for long ones.

    [ msgpack of (number, oldest, message) ] [ cells ] [ cells ] …
    [ CUT and the lengths of all of these  ] [ piece ] [ piece ] …      where one is longer than PIECE_BYTES

`number` counts the requests of a connection; an answer bears its request's. `oldest` is the smallest number whose
answer the sender still waits for: the server forgets what it kept for those before. Whatever the bytes, reading them
allocates no more than they are: msgspec grows with what is there, not with what a length says.
"""

import operator
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from tailrace.errors import WireError, one_line
from tailrace.transfer.wire.messages import Message

T = TypeVar("T")

Buffer: TypeAlias = bytes | bytearray | memoryview
MAX_FRAME_BYTES = 2**30
"""Of one frame."""
PIECE_BYTES = 2**22
"""Of what ZeroMQ sees: sockets refuse a longer piece before they make room for it. A stranger may send one piece."""
CUT = b"\xc1"
"""Begins no msgpack."""
_LENGTHS = np.dtype("<i8")
_NUMBER = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame, its message not looked at yet."""

    number: _NUMBER
    oldest: _NUMBER
    message: msgspec.Raw


class _Outgoing(msgspec.Struct, array_like=True):
    number: int
    oldest: int
    message: Message | msgspec.Raw


class Reply(NamedTuple):
    """An answer and the frames that came, or go, along."""

    answer: Message
    frames: Sequence[Buffer] = ()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=operator.index)  # of integers that are not Python's own, as numpy's
_UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises for a value that has no form in msgpack: a foreign type, a number too big, bad Unicode."""
_HEADERS = msgspec.msgpack.Decoder(Header)


def encode_request(message: Message) -> msgspec.Raw:
    """A request as it travels, for `encode`.

    Raises:
        WireError: a field holds what cannot travel.
    """
    try:
        return msgspec.Raw(_ENCODER.encode(message))
    except _UNFIT as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {_unfit(message)}{one_line(error)}") from None


def _unfit(message: Message) -> str:
    """The first field that cannot be encoded, to begin a message with."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        try:
            _ENCODER.encode(value)
        except _UNFIT:
            return f"{name} {value!r:.80}: "
    return ""


def encode(number: int, oldest: int, message: Message | msgspec.Raw, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of a message."""
    return _in_pieces([_ENCODER.encode(_Outgoing(number, oldest, message)), *frames])


def _in_pieces(frames: list[Buffer]) -> list[Buffer]:
    """As they are, or where one is too long cut, after a frame that says how."""
    if len(frames) == 1 and len(frames[0]) <= PIECE_BYTES:
        return frames
    views = [memoryview(frame).cast("B") for frame in frames]
    if max(map(len, views)) <= PIECE_BYTES:
        return frames
    lengths = np.array(list(map(len, views)), _LENGTHS).tobytes()
    return [CUT + lengths, *(view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES))]


def joined(first: bytes, pieces: Sequence[memoryview]) -> tuple[bytes, list[memoryview]]:
    """The header and the other frames of a message that was cut.

    Raises:
        WireError: the pieces are not those that `first` tells of.
    """
    packed = first[len(CUT) :]
    if len(packed) % _LENGTHS.itemsize:
        raise WireError(f"{len(packed)} bytes are not the lengths of frames")
    left = list(reversed(pieces))
    frames = []
    for length in np.frombuffer(packed, _LENGTHS).tolist():
        count = -(-length // PIECE_BYTES)
        own = [left.pop() for _ in range(min(count, len(left)))] if length > 0 else []
        if sum(map(len, own)) != length:
            raise WireError(f"a frame of {length} bytes came in {len(own)} pieces that are not as long")
        frames.append(b"".join(own))
    if not frames or left:
        raise WireError(f"{len(left)} pieces came that belong to no frame")
    return frames[0], [memoryview(frame) for frame in frames[1:]]


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
    return decode(_HEADERS, frame, "the header of a message")


def decode(decoder: "msgspec.msgpack.Decoder[T]", data: Buffer | msgspec.Raw, what: str) -> T:
    """The bytes as what the decoder is for, which is called `what` in errors.

    Raises:
        WireError: these bytes are none.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"{memoryview(data).nbytes} bytes are not {what}: {one_line(error)}") from None
