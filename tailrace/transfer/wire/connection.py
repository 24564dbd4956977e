"""A client's connection to one server: many requests at once, each with retries and a limit.

    start ──▶ waiting ──sent, sent again──▶ answer ──▶ then(reply or error)
                 ▲                             │ Stranger: say Hello first, then send all waiting requests again
                 └─────────────────────────────┘ Waiting: a sign of life

Waiting: a connection never waits. `SyncClient`, `AsyncClient` and a server's loop call `receive` when the socket is
readable, and `tick` now and then. A request ends by its answer, by `cancel`, or as PeerLost: when the server has given
no sign of life for `limit_s`, or no answer within that and the time that the request may wait. ZeroMQ connects again by
itself.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import zmq

from tailrace.errors import PeerLost, QueueClosed, TailraceError, WireError
from tailrace.transfer.wire.calls import Call, Outcome, expect
from tailrace.transfer.wire.frames import Reply, check_frames, decode_header, encode, encode_request
from tailrace.transfer.wire.handshake import Identity
from tailrace.transfer.wire.messages import (
    Accepted,
    Cancel,
    Challenge,
    Failure,
    Hello,
    Message,
    Stranger,
    Waiting,
)
from tailrace.transfer.wire.protocol import Protocol
from tailrace.transfer.wire.sockets import connect, dealer, disconnect, readable, receive, send, server_at

Then: TypeAlias = Callable[[Outcome], None]
"""Called with the reply, or with the error that took its place. It must not raise."""
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time limits of a client's attempts."""

    limit_s: float = 30.0
    """Seconds without a sign of life after which a server counts as lost."""
    retry_s: float = 5.0
    """Seconds before a request is sent again; they double each time. Requests only get lost with a connection."""
    max_retry_s: float = 20.0
    liveness_s: float = 1.0
    """Seconds without a sign of life after which a client asks whether the server is still there; see `Peers`."""

    @classmethod
    def within(cls, limit_s: float) -> "Patience":
        """Limits by which a request is sent several times before it is given up: a server may have restarted."""
        return cls(limit_s=limit_s, retry_s=limit_s / 6, max_retry_s=limit_s / 2)

    @property
    def tick_s(self) -> float:
        """Seconds between checks for due work."""
        return min(self.retry_s, self.limit_s, 2 * self.liveness_s) / 4


@dataclass(slots=True, eq=False)
class _Request:
    call: Call
    encoded: msgspec.Raw
    """The encoded message. A message that cannot be sent is refused before it is stored."""
    then: Then
    held: bool
    entering: bool
    """Whether the request is a part of saying Hello, which is sent at once."""
    started: float
    retry_at: float
    retry_s: float


class Connection:
    """A connection to one server. Each has its own identity, since a server counts the requests of each identity."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoint: str,
        identity: Identity,
        protocol: Protocol,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
        *,
        peer: str,
    ) -> None:
        """Connect in the background. `peer`: the server's name in error texts, such as "the controller".

        Raises:
            WireError: that is no endpoint.
        """
        self.socket = dealer(context, identity.password)
        self._events = self.socket.get_monitor_socket(_REFUSED | zmq.EVENT_DISCONNECTED)
        try:
            connect(self.socket, endpoint)  # only now: a server that refuses at once must not do so unheard
        except WireError:
            self._hang_up(0)
            raise
        self._is_connected = True
        self._endpoint = endpoint
        self._server = server_at(endpoint)
        """The id of the server that is meant. Another one in its place is as good as nobody: see `at_this_server`."""
        self._peer = f"{peer} at {endpoint}"
        self._identity = identity
        self._protocol = protocol
        self._patience = patience
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        """The requests without an answer, by number."""
        self._open: dict[int, Message | None] = {}
        """The messages without an answer, or held, by ascending number: the server keeps their answers.

        None stands for a message that is being undone.
        """
        self._next_number = 1
        self._known = False
        """Whether the server knows this connection, as far as this client can tell."""
        self._heard = -math.inf
        self._ticked = -math.inf

    @property
    def idle(self) -> bool:
        """Whether no request waits for an answer, so that no `tick` is needed."""
        return not self._requests

    @property
    def is_silent(self) -> bool:
        """Whether a request has waited `Patience.liveness_s` longer than it may, without a sign of life."""
        silent_since = self._clock() - self._patience.liveness_s
        return self._heard <= silent_since and any(
            request.started + request.call.wait_s <= silent_since for request in self._requests.values()
        )

    def start(self, call: Call, then: Then, *, held: bool = False) -> int:
        """Send `call`, and return its number. `receive` or `tick` calls `then` at its end.

        `held`: the request can be cancelled even after its answer has come, until `release`.

        Raises:
            WireError: a frame is too long, or a field cannot be sent. The request leaves no trace.
        """
        check_frames(call.frames)
        if not self._is_connected:
            connect(self.socket, self._endpoint)
            self._is_connected = True
        number = self._add(call, then, held=held)
        if self._known:
            self._send(number)
        elif not any(request.entering for request in self._requests.values()):
            self._say_hello()
        return number

    def receive(self) -> bool:
        """Take in a message; return whether there was one."""
        message = receive(self.socket, copied=1)
        if message is None:
            return False
        self._take(*message)
        return True

    def tick(self) -> None:
        """Repeat the due requests, and give up those that waited too long. Do nothing before `Patience.tick_s`."""
        now = self._clock()
        if now < self._ticked + self._patience.tick_s:
            return
        self._forgive(now - self._ticked)
        self._ticked = now
        while not self.socket.closed and self.receive():
            pass  # a message that came in time is not late because nobody looked
        self._look_whether_cut_off(now)
        for number, request in list(self._requests.items()):
            if number not in self._requests:
                continue  # it ended with an earlier one
            if self._is_lost(request, now):
                self._give_up(number, now)
            elif now >= request.retry_at and (self._known or request.entering):
                request.retry_s = min(2 * request.retry_s, self._patience.max_retry_s)
                request.retry_at = now + request.retry_s
                self._send(number)

    def release(self, number: int) -> None:
        """End the hold on a request whose answer has been used. One that is being undone stays open until it is."""
        if self._open.get(number) is not None:
            del self._open[number]

    def cancel(self, number: int) -> None:
        """Have a request undone; `then` is not called any more. Harmless if it has ended and is not held.

        The server gets this like any other request, even if ZeroMQ is just connecting again.
        """
        message = self._open.get(number)
        if message is None:
            return
        self._requests.pop(number, None)
        if not message.mutates:
            del self._open[number]
            return
        # the request stays open until the server has heard: its answer must still be known, to be undone
        self._open[number] = None
        undo = self._add(Call(self._endpoint, Cancel(number)), lambda _: self._forget(number))
        if self._known:
            self._send(undo)

    def _forget(self, number: int) -> None:
        self._open.pop(number, None)

    def close(self) -> None:
        """Undo all requests under way, which end with QueueClosed. The last messages may take a second to leave.

        Calling it twice is harmless.
        """
        ended = list(self._requests.values())
        for number in list(self._open):
            self.cancel(number)
        self._requests.clear()
        for request in ended:
            request.then(QueueClosed("this client was closed"))
        self._hang_up(None if self._known else 0)

    def lose(self) -> None:
        """Hang up at once, since the server is gone for good. Waiting requests end with PeerLost."""
        ended = list(self._requests.values())
        self._requests.clear()
        self._open.clear()
        self._hang_up(0)
        for request in ended:
            request.then(PeerLost(f"{self._peer} is lost: its process is gone"))

    def _hang_up(self, linger: int | None) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._events.close(0)
            self.socket.close(linger)

    def _add(self, call: Call, then: Then, *, held: bool = False, entering: bool = False) -> int:
        encoded = encode_request(call.message)
        now = self._clock()
        if not self._requests:
            self._ticked = now
        number = self._next()
        self._open[number] = call.message
        retry_s = self._patience.retry_s
        self._requests[number] = _Request(call, encoded, then, held, entering, now, now + retry_s, retry_s)
        return number

    @property
    def _oldest(self) -> int:
        return next(iter(self._open))

    def _next(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def _send(self, number: int) -> None:
        request = self._requests[number]
        send(self.socket, encode(number, self._oldest, request.encoded, request.call.frames))

    def _take(self, head: list[bytes], frames: list[memoryview]) -> None:
        try:
            header = decode_header(head[0])
        except WireError:
            return  # the request of this answer is unknown; it is sent again
        if header.number not in self._requests:
            return  # a second answer, or one that came too late
        self._heard = self._clock()
        try:
            answer = self._protocol.decode_answer(header)
        except WireError as error:
            self._end(header.number, error)
            return
        match answer:
            case Waiting():
                return
            case Stranger():
                self._be_a_stranger(header.number)
            case Failure():
                self._end(header.number, answer.error())
            case _:
                self._end(header.number, Reply(answer, frames))

    def _end(self, number: int, result: Outcome) -> None:
        request = self._requests.pop(number)
        if not request.held or isinstance(result, TailraceError):  # an error leaves nothing to undo
            del self._open[number]
        request.then(result)

    def _forgive(self, passed_s: float) -> None:
        """Do not count the time in which this process was busy or stopped as the server's silence."""
        unseen = passed_s - max(self._patience.tick_s, self._patience.limit_s / 4)
        if unseen > 0:
            for request in self._requests.values():
                request.started += unseen
                request.retry_at += unseen

    def _is_lost(self, request: _Request, now: float) -> bool:
        limit = self._patience.limit_s
        silent_since = max(self._heard, request.started)
        return now >= silent_since + limit or now >= request.started + request.call.wait_s + limit

    def _give_up(self, number: int, now: float) -> None:
        request = self._requests[number]
        waited = now - request.started
        error = PeerLost(
            f"{self._peer} did not answer within {waited:.1f} s; is it still serving, on a machine that is "
            f"not overloaded? {self._protocol.state_hint}".rstrip()
        )
        self.cancel(number)
        request.then(error)

    def _look_whether_cut_off(self, now: float) -> None:
        """Check for a lost connection, and repeat the requests that were under way at once.

        ZeroMQ would go on trying to connect where it was refused. Here, only the next request tries again.
        """
        events = 0
        while not self.socket.closed and readable(self._events):
            events |= int.from_bytes(self._events.recv_multipart()[0][:2], sys.byteorder)
        if events & zmq.EVENT_DISCONNECTED:
            for request in self._requests.values():
                request.retry_at = now
        if events & _REFUSED and self._is_connected:
            self._disconnect()
            if self._server is not None:
                return  # whoever refuses is another server
            self._refuse(
                WireError(
                    f"at {self._endpoint} the server does not know the token that this client has, or is of another "
                    f"version of Tailrace: another one is there now; {self._protocol.address_hint}"
                )
            )

    def _disconnect(self) -> None:
        disconnect(self.socket, self._endpoint)
        self._is_connected = self._known = False

    # Saying Hello

    def _be_a_stranger(self, number: int) -> None:
        """Say Hello: the server does not know this connection, since ZeroMQ reconnected or the server restarted."""
        if self._known or self._requests[number].entering:
            self._known = False
            for entering in [number for number, request in self._requests.items() if request.entering]:
                del self._requests[entering], self._open[entering]
            self._say_hello()

    def _say_hello(self) -> None:
        hello = self._identity.hello()
        self._ask_to_enter(hello, lambda result: self._on_challenge(hello, result))

    def _ask_to_enter(self, message: Any, then: Then) -> None:
        self._send(self._add(Call(self._endpoint, message), then, entering=True))

    def _on_challenge(self, hello: Hello, result: Outcome) -> None:
        try:
            challenge = expect(result, Challenge)
            if self._server not in (None, challenge.server):
                self._disconnect()
                self._heard = -math.inf
                return
            prove = self._identity.prove(hello, challenge, hint=self._protocol.address_hint)
        except TailraceError as error:
            self._refuse(error)
        else:
            self._ask_to_enter(prove, self._on_entered)

    def _on_entered(self, result: Outcome) -> None:
        try:
            expect(result, Accepted)
        except TailraceError as error:
            self._refuse(error)
        else:
            self._known = True
            for number in self._requests:
                self._send(number)

    def _refuse(self, error: TailraceError) -> None:
        for number in list(self._requests):
            if number in self._requests:  # else it ended with an earlier one
                self._end(number, type(error)(str(error)))  # a copy for each: they are raised in different places
