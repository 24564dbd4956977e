"""One message as ZeroMQ frames: a header, then raw bytes, which are copied only if they are long.

    [ msgpack of (number, oldest, message) ] [ cells ] [ cells ] …
    [ CUT and the lengths of all of these  ] [ piece ] [ piece ] …      if one of these is longer than PIECE_BYTES

`number` counts the requests of a connection; an answer has its request's number. `oldest` is the smallest number whose
answer the sender still waits for: the server forgets the answers that it kept for those before. Reading a message
never allocates more than its bytes: msgspec grows with the bytes that are there, not with a length that they state.
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
"""The most bytes of one frame."""
PIECE_BYTES = 2**22
"""The most bytes of a ZeroMQ frame. Sockets refuse a longer one before they make room. A stranger may send one."""
CUT = b"\xc1"
"""A byte that begins no msgpack."""
_LENGTHS = np.dtype("<i8")
_NUMBER = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame, with its message not yet decoded."""

    number: _NUMBER
    oldest: _NUMBER
    message: msgspec.Raw


class _Outgoing(msgspec.Struct, array_like=True):
    number: int
    oldest: int
    message: Message | msgspec.Raw


class Reply(NamedTuple):
    """An answer with its frames, received or to be sent."""

    answer: Message
    frames: Sequence[Buffer] = ()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=operator.index)  # the hook takes integers such as numpy's
_UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""The errors of encoding a value that has no form in msgpack: a foreign type, too big a number, bad Unicode."""
_HEADERS = msgspec.msgpack.Decoder(Header)


def encode_request(message: Message) -> msgspec.Raw:
    """Encode a request's message, for `encode`.

    Raises:
        WireError: a field holds a value that cannot be sent.
    """
    try:
        return msgspec.Raw(_ENCODER.encode(message))
    except _UNFIT as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {_unfit(message)}{one_line(error)}") from None


def _unfit(message: Message) -> str:
    """The first field that cannot be encoded, as the beginning of an error text."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        try:
            _ENCODER.encode(value)
        except _UNFIT:
            return f"{name} {value!r:.80}: "
    return ""


def encode(number: int, oldest: int, message: Message | msgspec.Raw, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the frames of a message."""
    return _in_pieces([_ENCODER.encode(_Outgoing(number, oldest, message)), *frames])


def _in_pieces(frames: list[Buffer]) -> list[Buffer]:
    """Return the frames as they are. If one is too long, cut all, and put a frame with their lengths first."""
    if len(frames) == 1 and len(frames[0]) <= PIECE_BYTES:
        return frames
    views = [memoryview(frame).cast("B") for frame in frames]
    if max(map(len, views)) <= PIECE_BYTES:
        return frames
    lengths = np.array(list(map(len, views)), _LENGTHS).tobytes()
    return [CUT + lengths, *(view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES))]


def joined(first: bytes, pieces: Sequence[memoryview]) -> tuple[bytes, list[memoryview]]:
    """Return the header and the other frames of a message that was cut.

    Raises:
        WireError: the pieces do not match the lengths in `first`.
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
    """Check that frames can be sent.

    Raises:
        WireError: a frame is longer than MAX_FRAME_BYTES.
    """
    for frame in frames:
        if (nbytes := memoryview(frame).nbytes) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {nbytes} bytes is longer than {MAX_FRAME_BYTES}; send fewer rows at once")


def decode_header(frame: Buffer) -> Header:
    """Decode the header of a message.

    Raises:
        WireError: these bytes are none.
    """
    return decode(_HEADERS, frame, "the header of a message")


def decode(decoder: "msgspec.msgpack.Decoder[T]", data: Buffer | msgspec.Raw, what: str) -> T:
    """Decode bytes by `decoder`; `what` names the expected type in errors.

    Raises:
        WireError: these bytes are none.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"{memoryview(data).nbytes} bytes are not {what}: {one_line(error)}") from None
