"""Strangers crowd out one another, but no known client."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import zmq

from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.wire import porter
from tailrace.transfer.wire.messages import Accepted, Beat
from tailrace.transfer.wire.porter import Password
from tailrace.transfer.wire.server import Server
from tests.helpers.waiting import until
from tests.transfer.remote.test_port import is_open, port
from tests.transfer.wire.desk import LIMIT_S, TOKEN, serving
from tests.transfer.wire.test_server import Peer

STRANGERS = 32


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server("desk", TOKEN, QUEUE)) as running:
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
        until(lambda: sum(map(is_open, raws)) <= STRANGERS + 1)  # it hangs up on them one by one


def test_strangers_that_leave_make_room_for_others(server: Server) -> None:
    to = server.endpoints[1]
    for _ in range(3):
        with ExitStack() as stack:
            raws = strangers(stack, to, STRANGERS)
            with closing(Peer(to)) as peer:
                peer.enter()
            assert sum(map(is_open, raws)) >= STRANGERS - 1


def test_connections_end_before_descriptors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))  # half of them for connections
    with serving(Server("desk", TOKEN, QUEUE)) as few, ExitStack() as stack:
        to = few.endpoints[1]
        known = [stack.enter_context(closing(Peer(to))) for _ in range(10)]
        for peer in known:
            peer.enter()
        raws = strangers(stack, to, 20)
        for peer in known:
            assert peer.ask(10, Beat(1.0)) == Accepted()
        with suppress(ConnectionError):
            raws[-1].recv(64)  # ZeroMQ's greeting, or nothing
        until(lambda: sum(map(is_open, raws)) <= 2)  # the porter has closed their connections


@pytest.mark.parametrize("limit", [240, 256])
def test_few_descriptors_are_enough_for_a_client(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with serving(Server("desk", TOKEN, QUEUE)) as few, closing(Peer(few.endpoints[1])) as peer:
        peer.enter()


def test_a_connection_that_was_let_in_is_hung_up_on_unless_it_proves_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a client may have repeated another's password, and could begin a message without an end."""
    monkeypatch.setattr(porter, "_HANDSHAKE_S", 0.2)
    with serving(Server("desk", TOKEN, QUEUE)) as desk, closing(Peer(desk.endpoints[1])) as known:
        known.enter()
        with (
            closing(Peer(desk.endpoints[1])) as silent,
            closing(silent.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)) as monitor,
        ):
            assert monitor.poll(LIMIT_S * 1000), "it stands for ever"
            silent.socket.disable_monitor()
        assert known.ask(10, Beat(1.0)) == Accepted()


def test_a_descriptor_that_somebody_else_has_by_now_stays_as_it_is(tmp_path: Path) -> None:
    left, right = socket.socketpair()
    with left, right, (tmp_path / "file").open("w") as file:
        before = set(os.listdir("/proc/self/fd"))
        for descriptor in (left.fileno(), file.fileno(), 10**6):
            porter.hang_up(descriptor, (("127.0.0.1", 1), ("127.0.0.1", 2)))
        assert set(os.listdir("/proc/self/fd")) == before
        left.sendall(b"on")
        assert right.recv(2) == b"on"


def test_who_proved_itself_is_not_hung_up_on_though_the_porter_hears_of_it_late() -> None:
    """The porter may have taken in a hundred strangers since it last looked at the known ones."""
    with ExitStack() as stack:
        context: zmq.Context[zmq.SyncSocket] = stack.enter_context(zmq.Context())
        listening = stack.enter_context(context.socket(zmq.ROUTER))
        idle = porter.Porter(context, listening, TOKEN, on_failure=lambda _: None)
        stack.callback(idle.close)
        pairs = [socket.socketpair() for _ in range(STRANGERS + 3)]
        for near, far in pairs:
            far.setblocking(False)
            stack.enter_context(near), stack.enter_context(far)
            idle._strangers[near.fileno()] = porter._Stranger(time.monotonic(), porter.ends_of(near.fileno()))
        idle.know(pairs[0][0].fileno())
        idle._send_away()
        assert [number for number, (_, far) in enumerate(pairs) if not is_open(far)] == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["_answer", "_take_in"])
def test_a_server_ends_with_its_porter_and_says_why(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(self: porter.Porter) -> None:
        raise ValueError("too many frames")

    monkeypatch.setattr(porter.Porter, where, fail)
    with serving(Server("desk", TOKEN, QUEUE)) as desk, closing(Peer(desk.endpoints[1])):
        until(lambda: desk.stopped_by != "")
        assert desk.stopped_by == "no connection can be let in any more: ValueError: too many frames"


def test_a_password_is_for_one_name() -> None:
    first, second = Password.of(TOKEN), Password.of(TOKEN)
    assert first != second
    assert TOKEN not in first.word
