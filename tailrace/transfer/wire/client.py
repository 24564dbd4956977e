"""The base of both clients: connections by endpoint, and the calls of a step until all have their outcomes.

    run: operation ──Step──▶ Exchange ──start──▶ connections ──outcomes──▶ finish ──▶ operation
                                └── broken off (cancelled, Ctrl-C, too late): calls are taken back, `otherwise` is sent

A step may end with its first reply, or at a limit of its own. The calls that have no outcome then are taken back.

Waiting: only `SyncClient` and `AsyncClient` wait, each in its own way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import zmq

from tailrace.errors import PeerLost, QueueClosed, QueueTimeout, TailraceError
from tailrace.transfer.wire.calls import Call, Outcome, Step
from tailrace.transfer.wire.connection import Connection, Patience
from tailrace.transfer.wire.handshake import Identity, check_token
from tailrace.transfer.wire.peers import Peers
from tailrace.transfer.wire.protocol import Protocol

C = TypeVar("C", bound=Connection)


class Exchange:
    """The calls of one step."""

    def __init__(self, step: Step) -> None:
        """Hold the calls, which `ClientBase._start` begins and `_finish` or `_break_off` ends."""
        self.step = step
        self.outcomes: dict[int, Outcome] = {}
        """The outcomes that are there, by place among the calls."""
        self.missing = len(step.calls)
        """The number of outcomes that are still awaited."""
        self.started: dict[int, tuple[Connection, int]] = {}
        """The connection and number of each request, by place among the calls."""
        self.on_complete: Callable[[], object] | None = None
        """Called when no more outcomes are awaited."""

    def settle(self, place: int, outcome: Outcome) -> None:
        """Record the outcome of one call, unless the step has ended: then the call is taken back."""
        if not self.missing:
            return
        self.outcomes[place] = outcome
        ends = self.step.first and not isinstance(outcome, TailraceError)
        self.missing = 0 if ends else self.missing - 1
        if not self.missing and self.on_complete is not None:
            self.on_complete()


class ClientBase(ABC):
    """Connections to servers of one protocol."""

    def __init__(
        self,
        name: str,
        token: bytes,
        protocol: Protocol,
        *,
        peers: Peers | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`name`: a name for people to read. `peers`: this client's knowledge of the servers.

        Raises:
            WireError: the token is too short.
        """
        check_token(token)
        self._name = name
        self._token = token
        self._protocol = protocol
        self._peers = peers or Peers()
        self._patience = patience or Patience()
        self._tick_s = self._patience.tick_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._connections: dict[str, Connection] = {}
        self._under_way: set[Exchange] = set()
        """The exchanges that `close` breaks off: only a client with concurrent operations has any then."""

    def tell(self, calls: Sequence[Call]) -> None:
        """Send calls without waiting for their answers."""
        if self._context.closed:
            return
        for call in calls:
            self._connection(call.to).start(call, _ignore)

    def close(self) -> None:
        """Hang up. The last messages may take a second to leave. Operations under way are broken off with QueueClosed.

        Calling it twice is harmless.
        """
        try:
            for exchange in self._under_way:
                self.tell(exchange.step.otherwise)
            for connection in self._connections.values():
                connection.close()
        finally:
            self._connections.clear()
            self._context.destroy()

    @abstractmethod
    def _connect(self, endpoint: str) -> Connection:
        """Make a connection, which is driven from now on."""

    def _make(self, kind: type[C], endpoint: str) -> C:
        identity, peer = Identity(self._name, self._token), self._peers.name(endpoint)
        return kind(self._context, endpoint, identity, self._protocol, self._patience, peer=peer)

    def _connection(self, endpoint: str) -> Connection:
        if self._context.closed:
            raise QueueClosed("this client was closed")
        connection = self._connections.get(endpoint)
        if connection is None:
            connection = self._connections[endpoint] = self._connect(endpoint)
        return connection

    def _start(self, exchange: Exchange) -> None:
        """Send the calls, and call the step's `meanwhile`."""
        for place, call in enumerate(exchange.step.calls):
            try:
                connection = self._connection(call.to)
                number = connection.start(call, partial(exchange.settle, place), held=True)
            except TailraceError as error:
                exchange.settle(place, error)
            else:
                exchange.started[place] = connection, number
        exchange.step.meanwhile()

    def _finish(self, exchange: Exchange) -> list[Outcome]:
        """Return all outcomes, in the order of the calls. Calls without one are taken back."""
        exchange.missing = 0
        for place, (connection, number) in exchange.started.items():
            (connection.release if place in exchange.outcomes else connection.cancel)(number)
        late = "its step has ended without an answer to it"
        return [exchange.outcomes.get(place) or QueueTimeout(late) for place in range(len(exchange.step.calls))]

    def _break_off(self, exchange: Exchange) -> None:
        """Take back every call, even if its answer is there."""
        for connection, number in exchange.started.values():
            connection.cancel(number)
        self.tell(exchange.step.otherwise)

    def _look_after(self) -> None:
        """Give up servers that are gone, and ask about those that may be gone."""
        silent = {endpoint for endpoint, connection in self._connections.items() if connection.is_silent}
        gone = self._peers.gone(silent)
        for endpoint in gone:
            self._connections.pop(endpoint).lose()
        if (question := self._peers.question(silent - gone)) is not None:
            self._connection(question.to).start(question, self._peers.hear)

    def _too_late(self, within_s: float | None) -> PeerLost:
        """The error to raise for an operation that was given up after `within_s` seconds."""
        return PeerLost(
            f"{self._protocol.servers} have not done it within {within_s:g} s; are they still serving, on machines "
            f"that are not overloaded? {self._protocol.state_hint}".rstrip()
        )


def _ignore(outcome: Outcome) -> None:
    """Ignore an outcome that is not awaited."""
