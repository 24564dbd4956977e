"""The client of an event loop: any number of operations at once, over one socket for each server.

It drives the sockets by their file descriptors itself. ZeroMQ's becomes readable when something may have changed, and
any call on the socket, a send too, may use that up: so after each it is asked what has come.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from tailrace.errors import QueueClosed, TailraceError
from tailrace.transfer.wire.calls import Beside, Call, Operation, Outcome, Step, nothing, too_late
from tailrace.transfer.wire.connection import Connection, Patience, Then
from tailrace.transfer.wire.handshake import Identity, check_token
from tailrace.transfer.wire.peers import Peers
from tailrace.transfer.wire.protocol import Protocol
from tailrace.transfer.wire.sockets import readable

T = TypeVar("T")


class _Wire:
    """A connection in an event loop."""

    def __init__(self, connection: Connection, tick_s: float, ticked: Callable[[], None]) -> None:
        self.connection = connection
        self._tick_s = tick_s
        self._ticked = ticked
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.socket.fileno(), self._receive)
        self._timer: asyncio.TimerHandle | None = None

    def start(self, call: Call, then: Then, *, held: bool = False) -> int:
        number = self.connection.start(call, then, held=held)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._on_timer)
        self._look()
        return number

    def take(self, number: int) -> None:
        self.connection.take(number)

    def cancel(self, number: int) -> None:
        self.connection.cancel(number)
        self._look()

    def close(self) -> None:
        self._stop()
        self.connection.close()

    def lose(self) -> None:
        self._stop()
        self.connection.lose()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self.connection.socket.fileno())

    def _look(self) -> None:
        if not self.connection.socket.closed and readable(self.connection.socket):
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        while not self.connection.socket.closed and self.connection.receive():
            pass

    def _on_timer(self) -> None:
        self._timer = None
        self.connection.tick()
        self._look()
        if not self.connection.idle:
            self._timer = self._loop.call_later(self._tick_s, self._on_timer)
        self._ticked()


class AsyncClient:
    """Carries out operations beside each other: `async with AsyncClient("rollout", token, protocol) as client: ...`.

    For one event loop. An operation that is cancelled takes back what it was waiting for.
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
        self._context: zmq.Context[Any] = zmq.Context()
        self._wires: dict[str, _Wire] = {}
        self._steps: dict[int, Step] = {}
        """Under way, by id."""

    async def __aenter__(self) -> Self:
        """Nothing to do: it connects where a call goes."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    async def run(self, operation: Operation[T], *, within_s: float | None = None, beside: Beside = nothing) -> T:
        """The result of `operation`, given up after `within_s`, whatever it waits for. `beside`: see there.

        Raises:
            PeerLost: it was given up.
            TailraceError: what it raises.
        """
        try:
            async with asyncio.timeout(within_s):
                step = next(operation)
                while True:
                    self.tell(beside())
                    step = operation.send(await self._exchange(step))
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
            self._wire(call.to).start(call, _ignore)

    def close(self) -> None:
        """Hang up; what was sent last may take a second to leave. Operations under way are broken off: QueueClosed."""
        try:
            for step in self._steps.values():
                self.tell(step.otherwise)
            for wire in self._wires.values():
                wire.close()
        finally:
            self._wires.clear()
            self._context.destroy()

    async def _exchange(self, step: Step) -> list[Outcome]:
        started: list[tuple[_Wire, int]] = []
        outcomes: list[Outcome | asyncio.Future[Outcome]] = []
        self._steps[id(step)] = step
        try:
            if step.pause_s:
                await asyncio.sleep(step.pause_s)
            for call in step.calls:
                try:
                    wire = self._wire(call.to)
                    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
                    number = wire.start(call, partial(_settle, outcome), held=True)
                except TailraceError as error:
                    outcomes.append(error)
                else:
                    started.append((wire, number))
                    outcomes.append(outcome)
            step.meanwhile()
            results = [await outcome if isinstance(outcome, asyncio.Future) else outcome for outcome in outcomes]
        except BaseException:  # cancelled, too: even when the answer is there
            for wire, number in started:
                wire.cancel(number)
            self.tell(step.otherwise)
            raise
        finally:
            del self._steps[id(step)]
        for wire, number in started:
            wire.take(number)
        return results

    def _wire(self, endpoint: str) -> _Wire:
        if self._context.closed:
            raise QueueClosed("this client was closed")
        if endpoint not in self._wires:
            identity = Identity(self._name, self._token)
            peer = self._peers.name(endpoint)
            connection = Connection(self._context, endpoint, identity, self._protocol, self._patience, peer=peer)
            self._wires[endpoint] = _Wire(connection, self._patience.tick_s, self._look_after)
        return self._wires[endpoint]

    def _look_after(self) -> None:
        """Give up servers that are gone, and ask about those that may be."""
        silent = {endpoint for endpoint, wire in self._wires.items() if wire.connection.in_doubt}
        gone = self._peers.gone(silent)
        for endpoint in gone:
            self._wires.pop(endpoint).lose()
        if (question := self._peers.question(silent - gone)) is not None:
            self._wire(question.to).start(question, self._peers.take)


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():  # cancelled in the same turn of the loop
        future.set_result(outcome)


def _ignore(outcome: Outcome) -> None:
    """Nobody waits for it."""
