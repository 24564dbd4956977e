"""When whoever adds chunks has to tell the shelf."""

import math
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch

from tailrace.transfer.weights.messages import Fetch, Progress
from tailrace.transfer.weights.segments import Pool
from tailrace.transfer.weights.shelf import Shelf, Wanted
from tailrace.transfer.weights.versions import Holding, encode_manifest, plan_payload
from tailrace.transfer.wire.messages import Message
from tailrace.transfer.wire.server import Incoming, Server, Ticket

CHUNKS = 8


class Replies:
    """Stands for the server."""

    def __init__(self) -> None:
        self.to: list[Ticket] = []

    def reply(self, ticket: Ticket, answer: Message, frames: Sequence[memoryview] = ()) -> None:
        self.to.append(ticket)


@pytest.fixture
def holding() -> Iterator[Holding]:
    manifest = plan_payload(1, 0, {"w": torch.zeros(64 * CHUNKS, dtype=torch.int8)}, dtype=None, chunk_bytes=64)
    pool = Pool()
    yield Holding(manifest, encode_manifest(manifest), pool.take(manifest.nbytes, 1, busy=()))
    pool.close()


def test_a_holding_wakes_the_shelf_for_the_first_that_waits_and_for_nobody_who_was_answered(holding: Holding) -> None:
    replies = Replies()
    shelf = Shelf(cast(Server, replies))
    shelf.put(holding)

    def ask(client: str, wanted: Wanted) -> bool:
        return shelf.answer(Incoming(Ticket(client, 1), wanted, ())) is not None

    assert holding.wake_at == math.inf
    assert not ask("half", Progress(1, 0, 4))
    assert holding.wake_at == 4
    assert not ask("third chunk", Fetch(1, 2))
    assert not ask("all", Progress(1, 0, CHUNKS))
    assert holding.wake_at == 3
    for chunk, (answered, wake_at) in enumerate([(0, 3), (0, 3), (1, 4), (2, CHUNKS)]):
        holding.add(chunk, bytes(8))
        shelf.look()
        assert (len(replies.to), holding.wake_at) == (answered, wake_at)
    assert ask("third chunk", Fetch(1, 2)), "it is here"
    assert holding.wake_at == CHUNKS
    shelf.leave("all")
    assert ask("half", Progress(1, 0, 4))
    assert [ticket.client for ticket in replies.to] == ["third chunk", "half"]
