"""The client of a process that does one thing at a time: a call blocks until its replies are there, or its limit."""

import math
import time
from collections.abc import Sequence
from functools import partial
from operator import setitem
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from tailrace.errors import QueueClosed, TailraceError
from tailrace.transfer.wire.calls import Beside, Call, Operation, Outcome, Step, nothing, too_late
from tailrace.transfer.wire.connection import Connection, Patience
from tailrace.transfer.wire.handshake import Identity, check_token
from tailrace.transfer.wire.peers import Peers
from tailrace.transfer.wire.protocol import Protocol

T = TypeVar("T")


class SyncClient:
    """Carries out operations one after the other: `with SyncClient("trainer", token, protocol) as client: ...`.

    For one thread. Between calls it is silent, so whoever holds a lease renews it.
    """

    def __init__(
        self,
        name: str,
        token: bytes,
        protocol: Protocol,
        *,
        peers: Peers | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`name`: for people. `peers`: what is known about the servers.

        Raises:
            WireError: the token is too short.
        """
        check_token(token)
        self._name = name
        self._token = token
        self._protocol = protocol
        self._peers = peers or Peers()
        self._patience = patience or Patience()
        self._tick_ms = math.ceil(self._patience.tick_s * 1000)
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._connections: dict[str, Connection] = {}
        self._by_socket: dict[Any, Connection] = {}

    def __enter__(self) -> Self:
        """Nothing to do: it connects where a call goes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def run(self, operation: Operation[T], *, within_s: float | None = None, beside: Beside = nothing) -> T:
        """The result of `operation`, given up after `within_s`, whatever it waits for. `beside`: see there.

        Raises:
            PeerLost: it was given up.
            TailraceError: what it raises.
        """
        deadline = math.inf if within_s is None else time.monotonic() + within_s
        try:
            step = next(operation)
            while True:
                self.tell(beside())
                step = operation.send(self._exchange(step, deadline))
        except StopIteration as stop:
            result: T = stop.value
            return result
        except TimeoutError:
            raise too_late(within_s, self._protocol) from None
        finally:
            operation.close()
            self.tell(beside())

    def tell(self, calls: Sequence[Call]) -> None:
        """Send calls whose answers nobody waits for."""
        if self._context.closed:
            return
        for call in calls:
            self._connection(call.to).start(call, _ignore)

    def close(self) -> None:
        """Hang up; what was sent last may take a second to leave. Closing twice is harmless."""
        try:
            for connection in self._connections.values():
                connection.close()
        finally:
            self._connections.clear()
            self._context.destroy()

    def _exchange(self, step: Step, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        started: list[tuple[Connection, int]] = []
        try:
            if step.pause_s:
                _sleep(step.pause_s, deadline)
            for place, call in enumerate(step.calls):
                try:
                    connection = self._connection(call.to)
                    started.append((connection, connection.start(call, partial(setitem, outcomes, place), held=True)))
                except TailraceError as error:
                    outcomes[place] = error
            step.meanwhile()
            while len(outcomes) < len(step.calls):
                if time.monotonic() >= deadline:
                    raise TimeoutError
                self._turn()
        except BaseException:  # Ctrl-C, too
            for connection, number in started:
                connection.cancel(number)
            self.tell(step.otherwise)
            raise
        for connection, number in started:
            connection.take(number)
        return [outcomes[place] for place in range(len(step.calls))]

    def _turn(self) -> None:
        for socket, _ in self._poller.poll(self._tick_ms):
            self._by_socket[socket].receive()
        for connection in self._connections.values():
            connection.tick()
        silent = {endpoint for endpoint, connection in self._connections.items() if connection.in_doubt}
        gone = self._peers.gone(silent)
        for endpoint in gone:
            self._lose(endpoint)
        if (question := self._peers.question(silent - gone)) is not None:
            self._connection(question.to).start(question, self._peers.take)

    def _lose(self, endpoint: str) -> None:
        connection = self._connections.pop(endpoint)
        self._poller.unregister(connection.socket)
        del self._by_socket[connection.socket]
        connection.lose()

    def _connection(self, endpoint: str) -> Connection:
        if self._context.closed:
            raise QueueClosed("this client was closed")
        if endpoint not in self._connections:
            identity = Identity(self._name, self._token)
            peer = self._peers.name(endpoint)
            connection = Connection(self._context, endpoint, identity, self._protocol, self._patience, peer=peer)
            self._connections[endpoint] = connection
            self._by_socket[connection.socket] = connection
            self._poller.register(connection.socket, zmq.POLLIN)
        return self._connections[endpoint]


def _sleep(seconds: float, deadline: float) -> None:
    left = deadline - time.monotonic()
    time.sleep(max(0.0, min(seconds, left)))
    if seconds >= left:
        raise TimeoutError


def _ignore(outcome: Outcome) -> None:
    """Nobody waits for it."""
