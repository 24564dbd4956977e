"""Strangers crowd out one another, and nobody else."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from tailrace.transfer.queue.wire.messages import Accepted, Beat
from tailrace.transfer.queue.wire.porter import Password
from tailrace.transfer.queue.wire.server import Server
from tests.transfer.remote.test_port import is_open, port
from tests.transfer.wire.desk import LIMIT_S, TOKEN, serving
from tests.transfer.wire.test_server import Peer

STRANGERS = 32


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server("desk", TOKEN)) as running:
        yield running


def strangers(stack: ExitStack, to: str, count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(port(to), timeout=LIMIT_S)) for _ in range(count)]


def test_who_has_spoken_is_not_hung_up_on_however_many_strangers_come(server: Server) -> None:
    to = server.endpoints[1]
    with closing(Peer(to)) as before, ExitStack() as stack:
        before.enter()
        raws = strangers(stack, to, 100)
        with closing(Peer(to)) as between:
            between.enter()
            raws += strangers(stack, to, 100)
            last = Peer(to)
            with closing(last):
                last.enter()
                for number, peer in enumerate((before, between, last), start=10):
                    assert peer.ask(number, Beat(1.0)) == Accepted(), "on a connection made anew it were a stranger"
        assert sum(map(is_open, raws)) <= STRANGERS + 1


def test_strangers_that_leave_make_room_for_others(server: Server) -> None:
    to = server.endpoints[1]
    for _ in range(3):
        with ExitStack() as stack:
            raws = strangers(stack, to, STRANGERS)
            with closing(Peer(to)) as peer:
                peer.enter()
            assert sum(map(is_open, raws)) >= STRANGERS - 1


def test_connections_end_before_descriptors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256 + 12, 256 + 12))
    with serving(Server("desk", TOKEN)) as few, ExitStack() as stack:
        to = few.endpoints[1]
        known = [stack.enter_context(closing(Peer(to))) for _ in range(10)]
        for peer in known:
            peer.enter()
        raws = strangers(stack, to, 20)
        for peer in known:
            assert peer.ask(10, Beat(1.0)) == Accepted()
        with suppress(ConnectionError):
            raws[-1].recv(64)  # what ZeroMQ says first, or nothing
        while sum(map(is_open, raws)) > 2:
            pass  # each is hung up on


def test_a_password_is_for_one_name() -> None:
    first, second = Password.of(TOKEN), Password.of(TOKEN)
    assert first != second
    assert TOKEN not in first.word
