"""Whatever comes to the port of a sender or a relay harms no other receiver."""

import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest

from tailrace.transfer.queue.messages import Stats
from tailrace.transfer.weights import messages as w
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tailrace.transfer.wire.messages import Beat, Failure, Stranger
from tests.transfer.remote.test_port import endless, greeting, mutations, port, rss, still_answers
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, tensors
from tests.transfer.wire.test_server import Peer

PROGRESS = w.ReceiverProgress(0, -1, -1, 0)
TO_SENDER: list[Any] = [
    w.GetPlan(0, "peer", "host", "centre", ["tcp://10.0.0.1:1"], "gloo", PROGRESS),
    w.ReportProgress(PROGRESS),
    w.ReportParent("nobody"),
]
QUESTIONS: list[Any] = [*TO_SENDER, w.GetManifest(1), w.GetSums(1, 0, 1), w.GetChunk(1, 0), w.Leave()]
TCP = ("tcp://127.0.0.1:*",)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[WeightSender, WeightReceiver]]:
    with (
        WeightSender(chunk_mib=CHUNK_MIB, listen=TCP) as sender,
        WeightReceiver(sender.address, name="good", listen=TCP, medium="tcp") as receiver,
    ):
        sender.publish(0, tensors(0).items())
        yield sender, receiver


@pytest.fixture(autouse=True)
async def good_receiver(pair: tuple[WeightSender, WeightReceiver]) -> Any:
    """Assert after every test that a version arrives."""
    yield
    sender, receiver = pair
    version = (sender.stats().version or 0) + 1
    sender.publish(version, tensors(version).items())
    assert await receiver.wait(version, timeout_s=LIMIT_S) == version
    check(receiver, version)


@pytest.fixture(params=["sender", "relay"])
def endpoint(request: pytest.FixtureRequest, pair: tuple[WeightSender, WeightReceiver]) -> str:
    return pair[0].address.endpoints[0] if request.param == "sender" else pair[1]._server.endpoints[0]


def entered(endpoint: str, token: bytes) -> Peer:
    peer = Peer(endpoint, token, w.WEIGHTS)
    peer.enter()
    return peer


def test_bytes_that_are_no_messages_are_dropped(endpoint: str, pair: tuple[WeightSender, WeightReceiver]) -> None:
    source = random.Random(0)
    token = pair[0].address.token
    for start in (b"", greeting(), greeting(token), greeting(token)[:-3]):
        with socket.create_connection(port(endpoint), timeout=LIMIT_S) as raw, suppress(ConnectionError):
            raw.sendall(start + source.randbytes(300))
    with closing(Peer(endpoint, token)) as peer:
        for _ in range(200):
            peer.send(*(source.randbytes(source.randrange(80)) for _ in range(source.randrange(1, 5))))
        assert not still_answers(peer, 10_000, Beat(1.0))


def test_what_strangers_send_takes_no_memory(endpoint: str) -> None:
    before = rss()
    with endless(endpoint, greeting()):
        pass
    assert rss() - before < 2**26


def test_who_has_not_proved_anything_gets_nothing(endpoint: str, pair: tuple[WeightSender, WeightReceiver]) -> None:
    with closing(Peer(endpoint, pair[0].address.token)) as peer:
        for number, question in enumerate(QUESTIONS, start=1):
            assert peer.ask(number, question) == Stranger()


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: type(question).__name__)
def test_every_field_of_every_question_that_is_broken(
    endpoint: str, pair: tuple[WeightSender, WeightReceiver], question: Any
) -> None:
    before = rss()
    with closing(entered(endpoint, pair[0].address.token)) as peer:
        count = 0
        for count, broken in enumerate(mutations(question), start=1):
            peer.send(msgspec.msgpack.encode([10 + count, 10 + count, broken]))
        answers = still_answers(peer, 10 + count + 1, Beat(1.0))
        assert sum(isinstance(answer, Failure) for answer in answers) > count / 3
        if not isinstance(question, w.Leave):
            peer.send(msgspec.msgpack.encode([10 + count + 2, 0, w.Leave()]))
        still_answers(peer, 10 + count + 3, Beat(1.0))
    assert rss() - before < 2**28


def test_garbage_in_place_of_a_question_is_an_error(endpoint: str, pair: tuple[WeightSender, WeightReceiver]) -> None:
    source = random.Random(2)
    with closing(entered(endpoint, pair[0].address.token)) as peer:
        for number in range(10, 200):
            body = msgspec.Raw(msgspec.msgpack.encode(["GetChunk", source.randbytes(source.randrange(60))]))
            answer = peer.ask(number, body)
            assert isinstance(answer, Failure)
            assert "not a request" in answer.text


def test_questions_for_the_sender_are_refused_by_a_relay(pair: tuple[WeightSender, WeightReceiver]) -> None:
    with closing(entered(pair[1]._server.endpoints[0], pair[0].address.token)) as peer:
        for number, question in enumerate(TO_SENDER, start=10):
            answer = peer.ask(number, question)
            assert isinstance(answer, Failure)
            assert "is not for this server, which is 'good'" in answer.text


def test_questions_of_the_queue_are_refused(endpoint: str, pair: tuple[WeightSender, WeightReceiver]) -> None:
    with closing(entered(endpoint, pair[0].address.token)) as peer:
        answer = peer.ask(10, Stats())
        assert isinstance(answer, Failure)
        assert "not a request" in answer.text


def test_chunks_that_a_version_has_not_are_refused(endpoint: str, pair: tuple[WeightSender, WeightReceiver]) -> None:
    serial = pair[0]._serial
    with closing(entered(endpoint, pair[0].address.token)) as peer:
        for number, question in enumerate([w.GetChunk(serial, 10**6), w.GetSums(serial, 3, 3)], start=10):
            answer = peer.ask(number, question)
            assert isinstance(answer, Failure)
            assert "asks for chunks" in answer.text
