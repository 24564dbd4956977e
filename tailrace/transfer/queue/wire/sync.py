"""The client of a process that does one thing at a time: a call blocks until its replies are there, or its limit."""

import math
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from tailrace.errors import QueueClosed, TailraceError
from tailrace.transfer.queue.wire.calls import Call, Operation
from tailrace.transfer.queue.wire.connection import Connection, Patience
from tailrace.transfer.queue.wire.frames import Reply
from tailrace.transfer.queue.wire.handshake import Identity, check_token

T = TypeVar("T")


class _Gathering:
    """The results of calls made at once."""

    def __init__(self, count: int) -> None:
        self.replies: list[Reply | None] = [None] * count
        self.missing = count
        self.error: TailraceError | None = None

    def put(self, place: int, result: Reply | TailraceError) -> None:
        self.missing -= 1
        if isinstance(result, TailraceError):
            self.error = self.error or result
        else:
            self.replies[place] = result

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class SyncClient:
    """Carries out operations one after the other: `with SyncClient("trainer", token) as client: client.run(...)`.

    For one thread. Between calls it is silent, so whoever holds a lease renews it.
    """

    def __init__(self, name: str, token: bytes, *, patience: Patience | None = None) -> None:
        """`name`: for people.

        Raises:
            WireError: the token is too short.
        """
        check_token(token)
        self._name = name
        self._token = token
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

    def run(self, operation: Operation[T]) -> T:
        """The result of `operation`.

        Raises:
            PeerLost: a server did not answer within its limit.
            QueueClosed: this client was closed.
            TailraceError: what a server answered with.
        """
        try:
            step = next(operation)
            while True:
                try:
                    replies = self._exchange(step.calls)
                except TailraceError as error:
                    self._tell(step.otherwise)
                    step = operation.throw(error)
                except BaseException:  # Ctrl-C
                    self._tell(step.otherwise)
                    raise
                else:
                    step = operation.send(replies)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()

    def close(self) -> None:
        """Hang up; what was sent last may take a second to leave. Closing twice is harmless."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._context.term()

    def _exchange(self, calls: Sequence[Call]) -> list[Reply]:
        gathering = _Gathering(len(calls))
        started: list[tuple[Connection, int]] = []
        try:
            for place, call in enumerate(calls):
                connection = self._connection(call.to)
                started.append((connection, connection.start(call, partial(gathering.put, place), held=True)))
            while gathering.missing and gathering.error is None:
                self._turn()
            gathering.check()
        except BaseException:  # Ctrl-C, too
            for connection, number in started:
                connection.cancel(number)
            raise
        for connection, number in started:
            connection.take(number)
        return [reply for reply in gathering.replies if reply is not None]

    def _turn(self) -> None:
        for socket, _ in self._poller.poll(self._tick_ms):
            self._by_socket[socket].receive()
        for connection in self._connections.values():
            connection.tick()

    def _tell(self, calls: Sequence[Call]) -> None:
        if self._context.closed:
            return
        for call in calls:
            self._connection(call.to).start(call, _ignore)

    def _connection(self, endpoint: str) -> Connection:
        if self._context.closed:
            raise QueueClosed("this client was closed")
        if endpoint not in self._connections:
            connection = Connection(self._context, endpoint, Identity(self._name, self._token), self._patience)
            self._connections[endpoint] = connection
            self._by_socket[connection.socket] = connection
            self._poller.register(connection.socket, zmq.POLLIN)
        return self._connections[endpoint]


def _ignore(result: Reply | TailraceError) -> None:
    """Nobody waits for it."""
