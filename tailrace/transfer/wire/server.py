"""The loop of a server: one thread, one ROUTER socket, and links to other servers.

    connection ──message──▶ Authenticator ──stranger──▶ "say Hello first"
                             └──client──▶ answered before? the same answer again
                                          waits? "it waits"       else ──▶ handler ──▶ answer now, or `reply` later

Who waits on whom: nobody on a handler, which returns at once; one whose answer needs something else to happen returns
None and keeps the ticket. The loop waits for messages, for the service's next deadline and for `stop`. A handler's
TailraceError is the answer to that request alone. Bytes that are no message are dropped: there is nobody to answer.

Time in which the loop did not turn, since its process was stopped or busy, is nobody's silence: see `RunningClock`.
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
from tailrace.transfer.wire.sockets import DEFAULT_ENDPOINTS, Listener, send

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_AT_ONCE = 256
"""Messages taken in before timers are looked at again."""
_MAX_WAIT_S = LONGEST_STEP_S / 2
"""Of one poll, so that the clock goes on."""
_NOBODYS = 0
"""The number of no request: clients count from 1, and pass over an answer to it."""


class Ticket(NamedTuple):
    """A request that can be answered."""

    client: str
    number: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request with who asks."""

    ticket: Ticket
    message: Any
    """Of the type that its handler is for."""
    frames: Sequence[memoryview]
    """Not to be kept longer than the memory of the whole message may be kept."""


Handler = Callable[[Incoming], Reply | None]
"""Returns the answer, or None to give it later by `Server.reply`. A TailraceError that it raises is the answer, too."""


class Service(ABC):
    """What a server is for. Everything is called in the thread of `Server.run`."""

    @property
    @abstractmethod
    def handlers(self) -> Mapping[type[Message], Handler]:
        """By the type of the request; read once. Hello and Prove are the server's; Beat is accepted by default.

        That of Cancel undoes what `Server.answers` says was done for the request, or forgets its ticket.
        """

    @property
    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `tick` has something to do, by the server's clock."""

    @abstractmethod
    def tick(self, now: float) -> None:
        """Do what is due."""

    @abstractmethod
    def gone(self, client: str) -> None:
        """A client is forgotten: silent for long, on a connection that is gone. If it lives, it says Hello again."""


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
        """Listens from now on. `silence_s`: see `Authenticator`; `patience`: of links; `clock`: else a `RunningClock`.

        `signs_of_life`: all clients promise to speak more often than that, so that a silent one counts as dead though
        its connection stands. It may be stopped.

        Raises:
            WireError: it cannot listen there, or the token is too short.
        """
        self.name = name
        self._token = token
        self._protocol = protocol
        self._authenticator = Authenticator(token, silence_s=silence_s)
        self._signs_of_life = signs_of_life
        self._patience = patience or Patience()
        self._clock = clock or RunningClock()
        self.answers = Answers()
        """To the requests of all clients."""
        self._links: dict[Any, Connection] = {}
        self._stopped = False
        self.stopped_by = ""
        """Why `run` has ended."""
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
        """Where it listens."""
        return list(self._listener.endpoints)

    @property
    def now(self) -> float:
        """Seconds, by the clock of deadlines."""
        return self._clock()

    def link(self, endpoint: str, *, peer: str) -> Connection:
        """A connection to another server of the protocol, as a client of it, that this server's loop drives.

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
        """Serve until `stop`, then close everything. Requests that wait stay without an answer."""
        handlers = dict(service.handlers)
        handlers.setdefault(Beat, lambda _: Reply(Accepted()))
        for client in self.answers.clients:  # of a server before this one
            self._authenticator.expect(client, self.now)
        try:
            while not self._stopped:
                self._turn(service, handlers)
        finally:
            self._close()

    def stop(self, reason: str = "") -> None:
        """End `run` after the message in hand. From any thread or signal handler."""
        if not self._stopped:
            self.stopped_by = reason
        self._stopped = True
        self._interrupt()

    def call(self, action: Callable[[], None]) -> None:
        """Have `action` called by `run`, soon; never once that has ended. From any thread."""
        self._calls.append(action)
        self._interrupt()

    def _interrupt(self) -> None:
        with suppress(OSError):  # it has ended, or there are so many calls that it wakes up anyway
            self._waker.send(b"!")

    def reply(self, ticket: Ticket, answer: Message, frames: Sequence[Buffer] = ()) -> None:
        """Answer a request whose handler returned None. One that was cancelled is left without.

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
    """SIGINT and SIGTERM stop `server` in the block. For the main thread."""

    def stop(number: int, _: object) -> None:
        server.stop(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
