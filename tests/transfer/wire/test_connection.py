"""Retries, limits and Hello, against a server that the test plays; time is a number."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from tailrace.errors import LeaseError, PeerLost, QueueClosed, TailraceError, WireError
from tailrace.transfer.queue.messages import QUEUE, Claim, Joined, Renew
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.connection import Connection, Patience
from tailrace.transfer.wire.frames import Header, Reply, decode_header, encode
from tailrace.transfer.wire.handshake import Authenticator, Identity
from tailrace.transfer.wire.messages import Accepted, Beat, Cancel, Failure, Hello, Message, Prove, Stranger, Waiting
from tailrace.transfer.wire.porter import ends_of, hang_up
from tailrace.transfer.wire.sockets import Listener, at_this_server, receive, send
from tests.transfer.wire.desk import LIMIT_S, TOKEN

PATIENCE = Patience(limit_s=30.0, retry_s=1.0, max_retry_s=4.0)


def unexpected(error: BaseException) -> None:
    raise error


class Stage:
    """A connection, and the server at its other end."""

    def __init__(self, token: bytes = TOKEN) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.listener = Listener(self.context, ["ipc://*"], token, unexpected)
        self.socket, [endpoint] = self.listener.socket, self.listener.endpoints
        self.authenticator = Authenticator(token, silence_s=99)
        self.now = 0.0
        self.endpoint = endpoint
        self.connection = self._connect(endpoint)
        self.results: dict[int, Reply | TailraceError] = {}
        self.route = b""

    def _connect(self, endpoint: str) -> Connection:
        identity = Identity("tester", TOKEN)
        return Connection(self.context, endpoint, identity, QUEUE, PATIENCE, clock=lambda: self.now, peer="the desk")

    def mean_alone(self, server: str) -> None:
        """Connect again, to the server of this id alone."""
        self.connection.close()
        self.connection = self._connect(at_this_server(self.endpoint, server))

    def start(self, message: Message, wait_s: float = 0.0, *, held: bool = False) -> int:
        number: int
        number = self.connection.start(
            Call(self.endpoint, message, wait_s=wait_s),
            lambda result: self.results.__setitem__(number, result),
            held=held,
        )
        return number

    def arrived(self) -> Header:
        """The next message at the server."""
        assert self.socket.poll(LIMIT_S * 1000), "nothing comes"
        message = receive(self.socket, copied=2)
        assert message is not None
        [self.route, head], _ = message
        return decode_header(head)

    def asked(self) -> tuple[int, Message]:
        header = self.arrived()
        return header.number, QUEUE.decode_request(header)

    def nothing_comes(self) -> bool:
        """Whether nothing was sent before a marker that this sends."""
        marker = self.connection.start(Call(self.endpoint, Renew(0)), lambda _: None)
        alone = self.arrived().number == marker
        self.say(marker, Accepted())
        return alone

    def say(self, number: int, answer: Message) -> None:
        self.say_bytes(encode(number, 0, answer)[0])

    def say_bytes(self, head: Any) -> None:
        send(self.socket, [self.route, head])
        assert self.connection.socket.poll(LIMIT_S * 1000), "nothing comes back"
        assert self.connection.receive()

    def greet(self) -> None:
        number, hello = self.asked()
        assert isinstance(hello, Hello)
        self.say(number, self.authenticator.challenge(self.route, hello))
        number, prove = self.asked()
        assert isinstance(prove, Prove)
        assert self.authenticator.enter(self.route, prove, self.now) is not None
        self.say(number, Accepted())

    def pass_time(self, until: float) -> None:
        while self.now < until:
            self.now += PATIENCE.tick_s
            self.connection.tick()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.connection.close()
    made.listener.close()
    made.context.term()


@pytest.fixture
def known(stage: Stage) -> Stage:
    """A stage whose connection has passed Hello."""
    number = stage.start(Beat(1.0))
    stage.greet()
    assert stage.asked() == (number, Beat(1.0))
    stage.say(number, Accepted())
    return stage


def test_what_is_asked_before_hello_is_sent_after_it(stage: Stage) -> None:
    first, second = stage.start(Renew(1)), stage.start(Renew(2))
    stage.greet()
    assert [stage.asked(), stage.asked()] == [(first, Renew(1)), (second, Renew(2))]


def test_answers_in_any_order_go_to_their_own_requests(known: Stage) -> None:
    first, second = known.start(Renew(1)), known.start(Renew(2))
    known.say(second, Joined(2, {}))
    known.say(first, Failure("LeaseError", "gone"))
    assert known.results[second] == Reply(Joined(2, {}), [])
    assert isinstance(known.results[first], LeaseError)
    assert known.connection.idle


def test_each_request_says_which_answers_are_still_waited_for(known: Stage) -> None:
    first, second = known.start(Renew(1)), known.start(Renew(2))
    assert [known.arrived().oldest, known.arrived().oldest] == [first, first]
    known.say(first, Accepted())
    third = known.start(Renew(3))
    header = known.arrived()
    assert (header.number, header.oldest) == (third, second)


def test_a_request_without_an_answer_is_sent_again_more_and_more_seldom_until_its_limit(known: Stage) -> None:
    number = known.start(Renew(1))
    assert known.asked() == (number, Renew(1))
    sent: list[float] = []
    while number not in known.results:
        known.now += PATIENCE.tick_s
        known.connection.tick()
        if known.socket.poll(0) or (known.now in (1.0, 3.0, 7.0, 11.0) and known.socket.poll(LIMIT_S * 1000)):
            assert known.asked() == (number, Renew(1))
            sent.append(known.now)
    assert sent[:4] == [1.0, 3.0, 7.0, 11.0]
    assert known.now == 30.0
    error = known.results[number]
    assert isinstance(error, PeerLost)
    assert str(error).startswith(f"the desk at {known.endpoint} did not answer within 30.0 s; ")


def test_a_server_that_is_not_there_is_lost_after_the_limit(stage: Stage) -> None:
    number = stage.start(Renew(1))
    stage.pass_time(29.5)
    assert not stage.results
    stage.pass_time(30.0)
    assert isinstance(stage.results[number], PeerLost)


def test_a_server_that_gives_signs_of_life_may_take_as_long_as_the_request_may_wait(known: Stage) -> None:
    number = known.start(Claim("actor", None, None, 100.0), wait_s=100.0)
    for _ in range(4):
        known.pass_time(known.now + 25)
        known.say(number, Waiting())
    known.pass_time(129.5)
    assert number not in known.results
    known.say(number, Waiting())
    known.pass_time(130.0)
    assert isinstance(known.results[number], PeerLost)


def test_a_silent_server_is_lost_even_while_a_request_may_wait(known: Stage) -> None:
    number = known.start(Claim("actor", None, None, 3600.0), wait_s=3600.0)
    known.pass_time(30.0)
    assert isinstance(known.results[number], PeerLost)


def test_a_silent_server_is_is_silent_after_a_moment_beyond_what_a_request_may_wait(known: Stage) -> None:
    known.start(Claim("actor", None, None, 5.0), wait_s=5.0)
    known.pass_time(5.0 + PATIENCE.liveness_s - PATIENCE.tick_s)
    assert not known.connection.is_silent
    number = known.start(Renew(1))
    known.pass_time(5.0 + PATIENCE.liveness_s)
    assert known.connection.is_silent
    known.say(number, Waiting())
    assert not known.connection.is_silent


def test_a_server_that_is_gone_is_lost_at_once(known: Stage) -> None:
    number = known.start(Renew(1), held=True)
    known.connection.lose()
    assert isinstance(known.results[number], PeerLost)
    assert str(known.results[number]) == f"the desk at {known.endpoint} is lost: its process is gone"
    assert known.connection.idle
    known.connection.cancel(number)
    known.connection.release(number)


def test_the_time_in_which_nobody_looked_is_not_the_servers_silence(known: Stage) -> None:
    first, second = known.start(Renew(1)), known.start(Renew(2))
    assert [known.asked(), known.asked()] == [(first, Renew(1)), (second, Renew(2))]
    send(known.socket, [known.route, *encode(first, 0, Accepted())])
    assert known.connection.socket.poll(LIMIT_S * 1000)
    known.now += 3600.0
    known.connection.tick()
    assert known.results[first] == Reply(Accepted(), [])
    assert second not in known.results
    known.pass_time(known.now + 30.0)
    assert isinstance(known.results[second], PeerLost)


def test_a_stranger_says_hello_and_asks_everything_again(known: Stage) -> None:
    first, second = known.start(Renew(1)), known.start(Renew(2))
    assert [known.asked(), known.asked()] == [(first, Renew(1)), (second, Renew(2))]
    known.say(first, Stranger())
    known.say(second, Stranger())
    known.greet()
    assert [known.asked(), known.asked()] == [(first, Renew(1)), (second, Renew(2))]
    known.say(second, Accepted())
    assert list(known.results.values()) == [Reply(Accepted(), [])] * 2  # of the Beat, and of this request


def test_a_server_made_anew_in_the_middle_of_hello_is_greeted_again(stage: Stage) -> None:
    number = stage.start(Renew(1))
    hello_number, hello = stage.asked()
    assert isinstance(hello, Hello)
    stage.say(hello_number, stage.authenticator.challenge(stage.route, hello))
    prove_number, _ = stage.asked()
    stage.say(prove_number, Stranger())
    stage.greet()
    assert stage.asked() == (number, Renew(1))


def test_hello_is_said_again_when_it_gets_lost(stage: Stage) -> None:
    number = stage.start(Renew(1))
    lost, _ = stage.asked()
    stage.pass_time(1.0)
    again = stage.arrived()
    assert again.number == lost
    hello = QUEUE.decode_request(again)
    assert isinstance(hello, Hello)
    stage.say(lost, stage.authenticator.challenge(stage.route, hello))
    prove_number, prove = stage.asked()
    assert isinstance(prove, Prove)
    assert stage.authenticator.enter(stage.route, prove, 0.0)
    stage.say(prove_number, Accepted())
    assert stage.asked() == (number, Renew(1))


def test_a_server_that_does_not_know_the_token_ends_what_waits_and_the_next_request_tries_again(stage: Stage) -> None:
    first, second = stage.start(Renew(1)), stage.start(Renew(2))
    number, hello = stage.asked()
    assert isinstance(hello, Hello)
    stage.say(number, Authenticator(b"another token of some length", silence_s=9).challenge(stage.route, hello))
    for error in (stage.results[first], stage.results[second]):
        assert isinstance(error, WireError)
        assert "does not know the token" in str(error)
    third = stage.start(Renew(3))
    stage.greet()
    assert stage.asked() == (third, Renew(3))


def test_another_server_in_the_place_of_the_only_one_that_is_meant_counts_as_nobody(stage: Stage) -> None:
    stage.mean_alone("0123456789abcdef")
    number = stage.start(Renew(1))
    asked, hello = stage.asked()
    assert isinstance(hello, Hello)
    stage.say(asked, stage.authenticator.challenge(stage.route, hello))
    assert not stage.connection.is_silent
    stage.pass_time(PATIENCE.liveness_s)
    assert stage.connection.is_silent
    stage.pass_time(PATIENCE.limit_s)
    assert isinstance(stage.results[number], PeerLost)


def test_who_hears_first_that_a_server_does_not_know_the_token_may_close_the_connection(stage: Stage) -> None:
    closed: list[object] = []

    def close(result: object) -> None:
        closed.append(result)
        stage.connection.close()

    stage.connection.start(Call(stage.endpoint, Renew(1)), close)
    second = stage.start(Renew(2))
    number, hello = stage.asked()
    assert isinstance(hello, Hello)
    stage.say(number, Authenticator(b"another token of some length", silence_s=9).challenge(stage.route, hello))
    assert [type(result) for result in closed] == [WireError]
    assert isinstance(stage.results[second], QueueClosed)


def test_a_server_that_does_not_answer_is_named_with_how_to_see_its_state(known: Stage) -> None:
    number = known.start(Renew(1))
    known.pass_time(30.0)
    text = str(known.results[number])
    assert text.startswith(f"the desk at {known.endpoint} did not answer within 30.")
    assert text.endswith("on a machine that is not overloaded? `tailrace queue top` shows it")


@pytest.mark.parametrize("greeted", [False, True])
def test_what_cannot_be_sent_is_refused_and_leaves_nothing_behind(stage: Stage, greeted: bool) -> None:
    if greeted:
        first = stage.start(Renew(1))
        stage.greet()
        assert stage.asked() == (first, Renew(1))
        stage.say(first, Accepted())
    unfit = {"limit": Claim("actor", 2**70, None, 0.0), "task": Claim("\ud800", None, None, 0.0)}
    for name, message in unfit.items():
        with pytest.raises(
            WireError, match=f"^Claim cannot be sent: {name} {getattr(message, name)!r}".replace("\\", r"\\")
        ):
            stage.start(message)
        assert stage.connection.idle
    number = stage.start(Renew(2))
    if not greeted:
        stage.greet()
    assert stage.asked() == (number, Renew(2))


def test_integers_of_numpy_are_sent_as_integers(known: Stage) -> None:
    number = known.start(Claim("actor", np.int64(3), np.int32(0), 1.0))  # type: ignore[arg-type]
    assert known.asked() == (number, Claim("actor", 3, 0, 1.0))


def test_late_double_and_senseless_answers_change_nothing(known: Stage) -> None:
    number = known.start(Renew(1))
    known.say(number, Accepted())
    known.say(number, Failure("LeaseError", "too late"))
    known.say(number + 50, Accepted())
    known.say_bytes(b"\xc1 no message")
    assert known.results[number] == Reply(Accepted(), [])


def test_an_answer_that_cannot_be_read_is_the_error_of_its_request(known: Stage) -> None:
    number = known.start(Renew(1))
    known.say_bytes(encode(number, 0, Beat(1.0))[0])
    error = known.results[number]
    assert isinstance(error, WireError)
    assert "bytes are not an answer" in str(error)


def test_a_cancelled_request_that_changes_something_is_taken_back(known: Stage) -> None:
    number = known.start(Claim("actor", None, None, 5.0))
    assert known.arrived().number == number
    known.connection.cancel(number)
    header = known.arrived()
    assert QUEUE.decode_request(header) == Cancel(number)
    assert header.oldest == number, "its answer must still be known, to be undone"
    known.say(number, Accepted())
    known.connection.cancel(number)
    assert number not in known.results
    known.say(header.number, Accepted())
    assert known.connection.idle
    assert known.start(Renew(2)) == known.arrived().oldest, "nothing else is open"


def test_what_is_cancelled_while_the_connection_is_made_anew_is_taken_back_after_it(known: Stage) -> None:
    number = known.start(Claim("actor", None, None, 5.0))
    assert known.arrived().number == number
    known.say(number, Stranger())
    known.connection.cancel(number)
    known.greet()
    header = known.arrived()
    assert (QUEUE.decode_request(header), header.oldest) == (Cancel(number), number)


def test_what_was_given_up_is_undone_by_the_server_that_comes_back(known: Stage) -> None:
    number = known.start(Claim("actor", None, None, 5.0), held=True)
    assert known.arrived().number == number
    while number not in known.results:
        known.pass_time(known.now + PATIENCE.tick_s)
    assert isinstance(known.results[number], PeerLost)
    known.connection.release(number)
    while QUEUE.decode_request(header := known.arrived()) != Cancel(number):
        pass  # the claim, sent again and again
    known.say(header.number, Stranger())
    known.greet()
    header = known.arrived()
    assert (QUEUE.decode_request(header), header.oldest) == (Cancel(number), number), "its answer is still known"
    known.say(header.number, Accepted())
    assert known.start(Renew(2)) == known.arrived().oldest, "nothing else is open"


def test_a_cancelling_that_is_lost_on_the_way_is_sent_again(known: Stage) -> None:
    number = known.start(Claim("actor", None, None, 5.0))
    assert known.arrived().number == number
    known.connection.cancel(number)
    lost = known.arrived()
    known.pass_time(known.now + PATIENCE.retry_s)
    again = known.arrived()
    assert (again.number, QUEUE.decode_request(again)) == (lost.number, Cancel(number))


def test_what_was_under_way_when_the_connection_was_lost_is_sent_again_at_once(known: Stage) -> None:
    number = known.start(Claim("actor", None, None, 5.0))
    while (message := known.listener.receive()) is None:
        pass
    hang_up(message[0], ends_of(message[0]))
    assert known.connection._events.poll(LIMIT_S * 1000), "ZeroMQ does not say so"
    known.pass_time(known.now + PATIENCE.tick_s)  # long before a missing answer would make it be sent again
    assert known.arrived().number == number


def test_a_cancelled_request_that_changes_nothing_is_just_forgotten(known: Stage) -> None:
    number = known.start(Renew(1))
    assert known.arrived().number == number
    known.connection.cancel(number)
    assert known.connection.idle
    assert known.nothing_comes()


def test_closing_ends_what_waits(known: Stage) -> None:
    number = known.start(Renew(1))
    known.connection.close()
    assert isinstance(known.results[number], QueueClosed)
    known.connection.close()


@pytest.mark.parametrize("endpoint", ["nowhere", "tcp://", "http://a:1", "tcp://127.0.0.1:port", "ipc://" + "a" * 300])
def test_what_is_no_endpoint_is_refused(stage: Stage, endpoint: str) -> None:
    with pytest.raises(WireError, match="expected ipc://PATH or tcp://HOST:PORT"):
        Connection(stage.context, endpoint, Identity("tester", TOKEN), QUEUE, PATIENCE, peer="nobody")
    with zmq.Context() as context, pytest.raises(WireError, match="cannot listen at"):
        Listener(context, [endpoint], TOKEN, unexpected)
