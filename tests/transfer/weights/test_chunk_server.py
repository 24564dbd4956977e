"""The moments when code that adds chunks has to call the chunk server."""

import math
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch

from tailrace.transfer.weights.chunk_server import ChunkQuestion, ChunkServer
from tailrace.transfer.weights.messages import GetChunk, GetSums
from tailrace.transfer.weights.segments import Pool
from tailrace.transfer.weights.versions import StoredVersion, encode_manifest, plan_payload
from tailrace.transfer.wire.messages import Message
from tailrace.transfer.wire.server import Incoming, Server, Ticket

CHUNKS = 8


class Replies:
    """A stand-in for the server."""

    def __init__(self) -> None:
        self.to: list[Ticket] = []

    def reply(self, ticket: Ticket, answer: Message, frames: Sequence[memoryview] = ()) -> None:
        self.to.append(ticket)


@pytest.fixture
def stored() -> Iterator[StoredVersion]:
    manifest = plan_payload(1, 0, {"w": torch.zeros(64 * CHUNKS, dtype=torch.int8)}, dtype=None, chunk_bytes=64)
    pool = Pool()
    yield StoredVersion(manifest, encode_manifest(manifest), pool.take(manifest.nbytes, 1, busy=()))
    pool.close()


def test_a_version_wakes_the_chunk_server_for_the_first_that_waits_and_for_nobody_who_was_answered(
    stored: StoredVersion,
) -> None:
    replies = Replies()
    chunk_server = ChunkServer(cast(Server, replies))
    chunk_server.add(stored)

    def ask(client: str, wanted: ChunkQuestion) -> bool:
        return chunk_server.answer(Incoming(Ticket(client, 1), wanted, ())) is not None

    assert stored.wake_at == math.inf
    assert not ask("half", GetSums(1, 0, 4))
    assert stored.wake_at == 4
    assert not ask("third chunk", GetChunk(1, 2))
    assert not ask("all", GetSums(1, 0, CHUNKS))
    assert stored.wake_at == 3
    for chunk, (answered, wake_at) in enumerate([(0, 3), (0, 3), (1, 4), (2, CHUNKS)]):
        stored.add(chunk, bytes(8))
        chunk_server.answer_waiting()
        assert (len(replies.to), stored.wake_at) == (answered, wake_at)
    assert ask("third chunk", GetChunk(1, 2)), "it is here"
    assert stored.wake_at == CHUNKS
    chunk_server.forget_client("all")
    assert ask("half", GetSums(1, 0, 4))
    assert [ticket.client for ticket in replies.to] == ["third chunk", "half"]
