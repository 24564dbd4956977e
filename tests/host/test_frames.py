"""A message passes a pipe or a stream whole, or not at all."""

import asyncio
import io

import msgspec
import pytest

from tailrace.host.frames import LENGTH, frame, read_frame, receive_frame

MESSAGES = [{"number": 1}, "", b"x" * 100_000]


def test_what_is_framed_is_read_message_by_message() -> None:
    pipe = io.BytesIO(b"".join(map(frame, MESSAGES)))
    bodies = [body for body in iter(lambda: read_frame(pipe), None) if body is not None]
    assert [msgspec.msgpack.decode(body) for body in bodies] == MESSAGES


@pytest.mark.parametrize("kept", [0, 2, LENGTH.size, LENGTH.size + 3])
async def test_a_message_that_breaks_off_is_the_end(kept: int) -> None:
    part = frame({"number": 1})[:kept]
    assert read_frame(io.BytesIO(part)) is None
    reader = asyncio.StreamReader()
    reader.feed_data(part)
    reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await receive_frame(reader)


async def test_a_stream_gives_what_a_pipe_does() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(map(frame, MESSAGES)))
    assert [msgspec.msgpack.decode(await receive_frame(reader)) for _ in MESSAGES] == MESSAGES
