"""The loop of a server: one thread, one ROUTER socket, and links to other servers.

    connection ──message──▶ Authenticator ──stranger──▶ "say Hello first"
                             └──client──▶ answered before? the same answer again
                                          waits? "it waits"       else ──▶ handler ──▶ answer now, or `reply` later

Waiting: a handler returns at once. If its answer needs something else to happen, it returns None and keeps the ticket.
The loop waits for messages, for the service's next deadline and for `stop`. A handler's TailraceError is the answer to
that request alone. Bytes that are no message are dropped, since their sender is unknown.

Time in which the loop did not turn, since its process was stopped or busy, does not count as silence: see
`RunningClock`.
"""

import math
import signal
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from tailrace.errors import TailraceError, WireError, one_line
from tailrace.host.interrupt import handling
from tailrace.transfer.wire.answers import Answers
from tailrace.transfer.wire.clock import LONGEST_STEP_S, RunningClock
from tailrace.transfer.wire.connection import Connection, Patience
from tailrace.transfer.wire.frames import (
    Buffer,
    Header,
    Reply,
    check_frames,
    decode_header,
    encode,
)
from tailrace.transfer.wire.handshake import Authenticator, Identity
from tailrace.transfer.wire.messages import (
    Accepted,
    Beat,
    Cancel,
    Failure,
    Hello,
    Message,
    Prove,
    Stranger,
    Waiting,
)
from tailrace.transfer.wire.protocol import Protocol
from tailrace.transfer.wire.sockets import DEFAULT_ENDPOINTS, Listener, at_this_server, send

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_AT_ONCE = 256
"""The most messages that are taken in before timers are checked again."""
_MAX_WAIT_S = LONGEST_STEP_S / 2
"""The longest wait of one poll, so that the clock goes on."""
_NOBODYS = 0
"""The number of no request: clients count from 1, and ignore an answer to it."""


class Ticket(NamedTuple):
    """A request that can be answered."""

    client: str
    number: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request and its sender."""

    ticket: Ticket
    message: Any
    """The message, of the type that its handler is for."""
    frames: Sequence[memoryview]
    """The frames after the header. Keeping one keeps the memory of the whole message."""


Handler = Callable[[Incoming], Reply | None]
"""Returns the answer, or None to give it later by `Server.reply`. A TailraceError that it raises becomes the answer."""


class Service(ABC):
    """The work of a server. Everything is called in the thread of `Server.run`."""

    @property
    @abstractmethod
    def handlers(self) -> Mapping[type[Message], Handler]:
        """The handlers by type of request; read once. The server handles Hello and Prove, and Beat by default.

        The handler of Cancel undoes the work that `Server.answers` shows for the request, or forgets its ticket.
        """

    @property
    @abstractmethod
    def next_deadline(self) -> float | None:
        """The time when `tick` has something to do, by the server's clock."""

    @abstractmethod
    def tick(self, now: float) -> None:
        """Do the work that is due."""

    @abstractmethod
    def gone(self, client: str) -> None:
        """Forget a client that was silent for long, on a connection that is gone. If it lives, it says Hello again."""


class Server:
    """Serves a service until it is stopped: `Server(name, token, protocol)`, then `run(service)`."""

    def __init__(
        self,
        name: str,
        token: bytes,
        protocol: Protocol,
        *,
        endpoints: Sequence[str] = DEFAULT_ENDPOINTS,
        silence_s: float = 3600.0,
        signs_of_life: bool = False,
        patience: Patience | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start to listen.

        `silence_s`: see `Authenticator`. `patience`: the limits of links. `clock`: by default a `RunningClock`.
        `signs_of_life`: all clients promise to send messages more often than `silence_s`. So a silent client counts as
        dead though its connection stands: its process may be stopped.

        Raises:
            WireError: it cannot listen at an endpoint, or the token is too short.
        """
        self.name = name
        self._token = token
        self._protocol = protocol
        self._authenticator = Authenticator(token, silence_s=silence_s)
        self._signs_of_life = signs_of_life
        self._patience = patience or Patience()
        self._clock = clock or RunningClock()
        self.answers = Answers()
        """The answers to the requests of all clients."""
        self._links: dict[Any, Connection] = {}
        self._stopped = False
        self.stopped_by = ""
        """The reason why `run` has ended."""
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._listener = Listener(self._context, endpoints, token, self._porter_failed)
        except WireError:
            self._context.term()
            self._wake.close()
            self._waker.close()
            raise
        self._socket = self._listener.socket
        self._calls: deque[Callable[[], None]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)

    def _porter_failed(self, error: BaseException) -> None:
        self.stop(f"no connection can be let in any more: {type(error).__name__}: {one_line(error)}")

    @property
    def endpoints(self) -> list[str]:
        """The endpoints at which it listens."""
        return list(self._listener.endpoints)

    @property
    def own_endpoints(self) -> list[str]:
        """The same for clients that mean this server alone, and none that listens there after it."""
        return [at_this_server(endpoint, self._authenticator.server) for endpoint in self.endpoints]

    @property
    def now(self) -> float:
        """The time in seconds, by the clock of deadlines."""
        return self._clock()

    def link(self, endpoint: str, *, peer: str) -> Connection:
        """Connect to another server of the protocol as its client. This server's loop drives the connection.

        `peer`: see `Connection`.

        Raises:
            WireError: that is no endpoint.
        """
        identity = Identity(self.name, self._token)
        link = Connection(self._context, endpoint, identity, self._protocol, self._patience, self._clock, peer=peer)
        self._links[link.socket] = link
        self._poller.register(link.socket, zmq.POLLIN)
        return link

    def unlink(self, link: Connection) -> None:
        """Close a link."""
        self._poller.unregister(link.socket)
        del self._links[link.socket]
        link.close()

    def run(self, service: Service) -> None:
        """Serve until `stop`, then close everything. Waiting requests get no answer."""
        handlers = dict(service.handlers)
        handlers.setdefault(Beat, lambda _: Reply(Accepted()))
        for client in self.answers.clients:  # those of the server before this one
            self._authenticator.expect(client, self.now)
        try:
            while not self._stopped:
                self._turn(service, handlers)
        finally:
            self._close()

    def stop(self, reason: str = "") -> None:
        """End `run` after the current message. For any thread or signal handler."""
        if not self._stopped:
            self.stopped_by = reason
        self._stopped = True
        self._interrupt()

    def call(self, action: Callable[[], None]) -> None:
        """Have `run` call `action` soon, but never after its end. For any thread."""
        self._calls.append(action)
        self._interrupt()

    def _interrupt(self) -> None:
        with suppress(OSError):  # `run` has ended, or so many calls wait that it wakes up anyway
            self._waker.send(b"!")

    def reply(self, ticket: Ticket, answer: Message, frames: Sequence[Buffer] = ()) -> None:
        """Answer a request whose handler returned None. A cancelled request gets no answer.

        Raises:
            WireError: a frame is too long.
        """
        check_frames(frames)
        route = self.answers.put(ticket, Reply(answer, frames))
        if route is not None:
            send(self._socket, [route, *encode(ticket.number, 0, answer, frames)])

    def carry_out(self, incoming: Incoming, handler: Handler) -> None:
        """Have `handler` answer a request, such as one whose first handler returned None."""
        try:
            reply = handler(incoming)
            if reply is not None:
                check_frames(reply.frames)
        except TailraceError as error:
            reply = Reply(Failure.of(error))
        if reply is not None:
            self.reply(incoming.ticket, *reply)

    def _turn(self, service: Service, handlers: Mapping[type[Message], Handler]) -> None:
        for ready, _ in self._poller.poll(self._wait_ms(service)):
            if ready is self._socket:
                self._receive(handlers)
            elif ready in self._links:
                self._links[ready].receive()
            elif ready == self._wake.fileno():
                self._wake.recv(4096)
        while self._calls:
            self._calls.popleft()()
        now = self._clock()
        for link in list(self._links.values()):
            link.tick()
        if (deadline := service.next_deadline) is not None and deadline <= now:
            service.tick(now)
        for client in self._authenticator.silent(now, self._is_there):
            self.answers.forget(client)
            service.gone(client)

    def _is_there(self, connection: bytes) -> bool:
        """Whether a connection stands and may be silent: ZeroMQ itself asks whether the other process runs."""
        return not self._signs_of_life and send(self._socket, [connection, *encode(_NOBODYS, 0, Waiting())])

    def _wait_ms(self, service: Service) -> int:
        if self._stopped:
            return 0
        now = self._clock()
        deadlines = [service.next_deadline, self._authenticator.next_deadline]
        waits = [deadline - now for deadline in deadlines if deadline is not None]
        waits += [self._patience.tick_s for link in self._links.values() if not link.idle]
        # rounded up: a poll that ends just before its deadline would be made again and again
        return max(0, math.ceil(min([_MAX_WAIT_S, *waits]) * 1000))

    def _receive(self, handlers: Mapping[type[Message], Handler]) -> None:
        for _ in range(_AT_ONCE):
            message = self._listener.receive()
            if message is None:
                return
            descriptor, (route, *head), frames = message
            try:
                header = decode_header(head[0] if head else b"")
            except WireError:
                continue
            client = self._authenticator.client(route, self._clock())
            if client is None:
                self._answer_stranger(route, descriptor, header)
            else:
                self._answer_client(route, client, header, frames, handlers)

    def _answer_stranger(self, route: bytes, descriptor: int, header: Header) -> None:
        answer: Message = Stranger()
        try:
            match self._protocol.decode_request(header):
                case Hello() as hello:
                    answer = self._authenticator.challenge(route, hello)
                case Prove() as prove if client := self._authenticator.enter(route, prove, self._clock()):
                    self.answers.of(client)
                    self._listener.know(descriptor)
                    answer = Accepted()
        except TailraceError as error:
            answer = Failure.of(error)
        send(self._socket, [route, *encode(header.number, 0, answer)])

    def _answer_client(
        self,
        route: bytes,
        client: str,
        header: Header,
        frames: Sequence[memoryview],
        handlers: Mapping[type[Message], Handler],
    ) -> None:
        answers = self.answers.of(client)
        answers.forget(header.oldest)
        if answers.is_old(header.number):
            return
        if (kept := answers.kept(header.number)) is not None:
            send(self._socket, [route, *encode(header.number, 0, kept.answer, kept.frames)])
        elif answers.waits(header.number):
            answers.open(header.number, route)
            send(self._socket, [route, *encode(header.number, 0, Waiting())])
        else:
            answers.open(header.number, route)
            self._handle(Ticket(client, header.number), header, frames, handlers)

    def _handle(
        self, ticket: Ticket, header: Header, frames: Sequence[memoryview], handlers: Mapping[type[Message], Handler]
    ) -> None:
        answers = self.answers.of(ticket.client)
        try:
            message = self._protocol.decode_request(header)
        except WireError as error:
            self.reply(ticket, Failure.of(error))
            return
        if message.mutates:
            answers.keep(ticket.number)
        self.carry_out(Incoming(ticket, message, frames), handlers.get(type(message), self._refuse))
        if isinstance(message, Cancel):
            answers.cancel(message.number)

    def _refuse(self, incoming: Incoming) -> Reply:
        raise WireError(f"{type(incoming.message).__name__} is not for this server, which is {self.name!r}")

    def _close(self) -> None:
        for link in list(self._links.values()):
            self.unlink(link)
        self._listener.close()
        self._context.term()
        self._wake.close()
        self._waker.close()


@contextmanager
def stopped_by_signals(server: Server) -> Iterator[None]:
    """Stop `server` at SIGINT or SIGTERM inside the block. For the main thread."""

    def stop(number: int, _: object) -> None:
        server.stop(signal.Signals(number).name)

    with handling(SIGNALS, stop):
        yield
