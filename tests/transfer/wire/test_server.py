"""A server at its port: the clients that are heard, its answers, and input that must not end it."""

import itertools
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.errors import PeerLost, WireError
from tailrace.transfer.queue.messages import (
    QUEUE,
    Admit,
    Admitted,
    Claim,
    Claimed,
    Counted,
    Inventory,
    Nack,
    Renew,
    Stats,
)
from tailrace.transfer.wire import porter
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.frames import Reply, decode_header, encode
from tailrace.transfer.wire.handshake import Identity
from tailrace.transfer.wire.messages import Accepted, Beat, Cancel, Challenge, Failure, Message, Stranger, Waiting
from tailrace.transfer.wire.protocol import Protocol
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sockets import connect, dealer, receive, send
from tailrace.transfer.wire.sync import SyncClient
from tests.transfer.wire import talk
from tests.transfer.wire.desk import LIMIT_S, TOKEN, Desk, serving
from tests.transfer.wire.rows import packed


class Peer:
    """A client whose every frame the test chooses."""

    def __init__(self, endpoint: str, token: bytes = TOKEN, protocol: Protocol = QUEUE) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = endpoint
        self._protocol = protocol
        self.identity = Identity("peer", token)
        self.socket = dealer(self.context, self.identity.password)
        connect(self.socket, endpoint)

    def send(self, *frames: bytes) -> None:
        send(self.socket, frames)

    def answer(self) -> tuple[int, Message]:
        assert self.socket.poll(LIMIT_S * 1000), "no answer"
        message = receive(self.socket, copied=1)
        assert message is not None
        header = decode_header(message[0][0])
        return header.number, self._protocol.decode_answer(header)

    def ask(self, number: int, message: Message | msgspec.Raw, oldest: int = 0) -> Message:
        self.send(*encode(number, oldest, message))  # type: ignore[arg-type]
        answered, answer = self.answer()
        assert answered == number
        return answer

    def enter(self) -> None:
        hello = self.identity.hello()
        challenge = self.ask(1, hello)
        assert isinstance(challenge, Challenge)
        assert self.ask(2, self.identity.prove(hello, challenge, hint="")) == Accepted()

    def reconnect(self) -> None:
        """Come back as the same client on a new connection."""
        self.socket.close(0)
        self.socket = dealer(self.context, self.identity.password)
        connect(self.socket, self.endpoint)
        self.enter()

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Server("desk", TOKEN, QUEUE)) as running:
        yield running


@pytest.fixture
def stranger(server: Server) -> Iterator[Peer]:
    peer = Peer(server.endpoints[0])
    yield peer
    peer.close()


@pytest.fixture
def peer(stranger: Peer) -> Peer:
    stranger.enter()
    return stranger


def admit(count: int = 1) -> Admit:
    return Admit(packed([[1, 1, index] for index in range(count)]), packed([-1] * count), [], 0, 0.0)


def test_it_listens_in_a_private_directory_and_on_loopback(server: Server) -> None:
    ipc, tcp = server.endpoints
    directory = Path(ipc.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert tcp.startswith("tcp://127.0.0.1:")


def test_who_has_not_said_hello_is_heard_for_nothing_else(stranger: Peer) -> None:
    requests: list[Message] = [Beat(1.0), Stats(), admit(), Cancel(1)]
    for number, message in enumerate(requests, start=1):
        assert stranger.ask(number, message) == Stranger()


def test_a_wrong_token_is_an_error_at_both_ends(server: Server) -> None:
    with (
        SyncClient("thief", b"another token of some length", QUEUE) as client,
        pytest.raises(WireError, match="the server does not know the token"),
    ):
        client.run(talk.stats(server.endpoints[0]))


def test_a_proof_that_is_wrong_is_refused_and_can_be_tried_again(stranger: Peer) -> None:
    hello = stranger.identity.hello()
    challenge = stranger.ask(1, hello)
    assert isinstance(challenge, Challenge)
    prove = stranger.identity.prove(hello, challenge, hint="")
    failure = stranger.ask(2, type(prove)(bytes(32)))
    assert isinstance(failure, Failure)
    assert "does not know the token" in failure.text
    assert stranger.ask(3, prove) == Stranger()
    stranger.enter()


def test_another_protocol_is_told_so(stranger: Peer) -> None:
    hello = stranger.identity.hello()
    failure = stranger.ask(1, type(hello)(hello.client, hello.host, 99, hello.nonce))
    assert isinstance(failure, Failure)
    assert "speaks protocol 99" in failure.text


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4), st.booleans())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_dropped_and_the_service_goes_on(peer: Peer, frames: list[bytes], numbered: bool) -> None:
    if numbered:
        frames[0] = b"\x93\xcd\x10\x00\x00" + frames[0]
    peer.send(*frames)
    peer.send(*encode(5000, 0, Beat(1.0)))  # type: ignore[arg-type]
    answers = [peer.answer()]
    while answers[-1][0] != 5000:
        answers.append(peer.answer())
    assert answers[-1][1] == Accepted()
    assert len(answers) <= 2
    assert all(isinstance(answer, Failure) for _, answer in answers[:-1])


def test_bytes_at_the_port_that_are_not_even_zeromq_do_no_harm(server: Server, peer: Peer) -> None:
    port = int(server.endpoints[1].rpartition(":")[2])
    source = random.Random(0)
    for start in (b"", b"\xff\0\0\0\0\0\0\0\1\x7f", b"GET / HTTP/1.1\r\n\r\n", b"\x02" + b"\xff" * 8):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as raw:
            raw.sendall(start + source.randbytes(300))
    assert peer.ask(9, Beat(1.0)) == Accepted()


def test_a_request_that_this_server_is_not_for_is_a_failure(peer: Peer) -> None:
    failure = peer.ask(9, Inventory())
    assert isinstance(failure, Failure)
    assert failure.text == "Inventory is not for this server, which is 'desk'"


def test_the_error_of_a_handler_reaches_who_asked_and_nobody_else(server: Server, peer: Peer) -> None:
    with closing(Peer(server.endpoints[1])) as other:
        other.enter()
        failure = peer.ask(9, Renew(-1))
        assert (failure, other.ask(9, Beat(1.0))) == (Failure("LeaseError", "lease -1 holds nothing"), Accepted())
    failure = peer.ask(10, Admit(b"odd", b"", [], 0, 0.0))
    assert isinstance(failure, Failure)
    assert failure.kind == "WireError"


def test_a_request_that_comes_again_gets_the_first_answer_on_whatever_connection(peer: Peer) -> None:
    first = peer.ask(9, admit(), oldest=9)
    assert isinstance(first, Admitted)
    assert peer.ask(9, admit(), oldest=9) == first
    peer.reconnect()
    assert peer.ask(9, admit(), oldest=9) == first
    again = peer.ask(10, admit(), oldest=10)
    assert isinstance(again, Admitted)
    assert again != first
    peer.send(*encode(9, 9, admit()))  # type: ignore[arg-type]
    assert peer.ask(11, Beat(1.0), oldest=10) == Accepted(), "a late copy has no answer"
    for _ in range(2):
        claimed = peer.ask(12, Claim("actor", None, None, 0.0), oldest=12)
    assert isinstance(claimed, Claimed)
    assert isinstance(peer.ask(13, Claim("actor", None, None, 0.0), oldest=13), Claimed)


def test_the_first_answer_may_be_an_error(peer: Peer) -> None:
    before = peer.ask(9, Nack(-1, None))
    assert isinstance(before, Failure)
    assert peer.ask(9, Nack(-1, None)) == before


def test_a_claim_waits_says_so_when_it_is_repeated_and_is_answered_on_the_newest_connection(peer: Peer) -> None:
    claim = Claim("actor", None, None, 60.0)
    peer.send(*encode(9, 9, claim))  # type: ignore[arg-type]
    assert peer.ask(9, claim, oldest=9) == Waiting()
    peer.reconnect()
    assert peer.ask(9, claim, oldest=9) == Waiting()
    peer.send(*encode(10, 9, admit()))  # type: ignore[arg-type]
    answers = dict([peer.answer(), peer.answer()])
    assert isinstance(answers[9], Claimed)
    assert isinstance(answers[10], Admitted)


def test_a_deadline_of_the_service_comes_without_any_message(peer: Peer) -> None:
    assert peer.ask(9, Claim("actor", None, None, 0.01)) == Failure("QueueTimeout", "a claim waited its limit")


def test_cancelling_forgets_what_waits_and_undoes_what_was_done(peer: Peer) -> None:
    peer.send(*encode(9, 9, Claim("actor", None, None, 60.0)))  # type: ignore[arg-type]
    assert peer.ask(10, Cancel(9), oldest=9) == Accepted()
    assert isinstance(peer.ask(11, admit(), oldest=9), Admitted)
    claimed = peer.ask(12, Claim("actor", None, None, 0.0), oldest=9)
    assert isinstance(claimed, Claimed), "the cancelled claim did not take the row"
    assert peer.ask(13, Cancel(12), oldest=12) == Accepted()
    again = peer.ask(14, Claim("actor", None, None, 0.0), oldest=14)
    assert isinstance(again, Claimed)
    assert again.rows == claimed.rows


class Forgetting(Desk):
    """A desk that signals when it has heard of a client's end."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.told = threading.Event()

    def gone(self, client: str) -> None:
        super().gone(client)
        self.told.set()


def test_a_client_that_is_silent_on_a_connection_that_stands_is_not_forgotten() -> None:
    now = 0.0
    server = Server("desk", TOKEN, QUEUE, silence_s=5.0, clock=lambda: now)
    desk = Forgetting(server)
    to = server.endpoints[0]
    with serving(server, desk), closing(Peer(to)) as silent, closing(Peer(to)) as waking:
        silent.enter()
        dead = Peer(to)
        dead.enter()
        dead.close()
        for number in itertools.count(1):  # ZeroMQ notices the end of a connection at some time
            now += 5.0
            assert waking.ask(number, Beat(1.0)) == Stranger()
            if desk.told.wait(0.01):
                break
        assert desk.forgotten == [dead.identity.unique]
        silent.send(*encode(3, 0, Beat(1.0)))  # type: ignore[arg-type]
        answers = iter(silent.answer, (3, Accepted()))
        assert all(answer == (0, Waiting()) for answer in answers), "asked whether it is there"


def test_a_client_that_promises_signs_of_life_is_forgotten_when_it_is_silent_and_comes_back_by_hello() -> None:
    now = 0.0
    server = Server("desk", TOKEN, QUEUE, silence_s=5.0, signs_of_life=True, clock=lambda: now)
    desk = Forgetting(server)
    with serving(server, desk), closing(Peer(server.endpoints[0])) as peer:
        peer.enter()
        assert peer.ask(3, Beat(1.0)) == Accepted()
        with closing(Peer(server.endpoints[0])) as other:
            now = 5.0
            assert other.ask(1, Beat(1.0)) == Stranger(), "which only wakes the server"
            assert desk.told.wait(LIMIT_S)
        assert desk.forgotten == [peer.identity.unique]
        assert peer.ask(4, Beat(1.0)) == Stranger()
        peer.enter()
        assert peer.ask(5, Beat(1.0)) == Accepted()


def test_a_link_of_a_server_to_another_carries_requests_in_its_loop(server: Server) -> None:
    linked = Server("unit", TOKEN, QUEUE)
    results: list[object] = []

    class Linking(Desk):
        def __init__(self) -> None:
            super().__init__(linked)
            self.link = linked.link(server.endpoints[0], peer="the desk")
            self.link.start(Call("", Stats()), self.on_stats)

        def on_stats(self, result: object) -> None:
            results.append(result)
            linked.unlink(self.link)
            linked.stop()

    linked.run(Linking())
    [reply] = results
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, Counted)


def test_a_link_to_a_server_that_is_not_there_ends_as_lost(tmp_path: Path) -> None:
    linked = Server("unit", TOKEN, QUEUE, patience=Patience(limit_s=0.05, retry_s=0.02))
    results: list[object] = []
    link = linked.link(f"ipc://{tmp_path}/nobody", peer="nobody")

    def on_result(result: object) -> None:
        results.append(result)
        linked.stop()

    link.start(Call("", Beat(1.0)), on_result)
    linked.run(Desk(linked))
    assert isinstance(results[0], PeerLost)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(porter, "_HANDSHAKE_S", 0.01)
    with serving(Server("desk", TOKEN, QUEUE)) as quick:
        host, port = quick.endpoints[1].removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as mute:
            while mute.recv(4096):
                pass  # ZeroMQ's greeting


def test_a_port_that_is_taken_is_refused(server: Server) -> None:
    with pytest.raises(WireError, match=r"cannot listen at 'tcp://.*in use"):
        Server("desk", TOKEN, QUEUE, endpoints=[server.endpoints[1]])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_and_removes_its_socket(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.transfer.wire.desk", TOKEN.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ipc = process.stdout.readline().split()[0]
        os.kill(process.pid, number)
        assert process.wait(LIMIT_S) == 0
    assert not Path(ipc.removeprefix("ipc://")).exists()
