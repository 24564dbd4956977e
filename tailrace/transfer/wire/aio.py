"""The client of an event loop: any number of operations at once, over one socket for each server.

The client drives the sockets by their file descriptors itself. A ZeroMQ descriptor becomes readable when something may
have changed. Any call on the socket, also a send, may use that up. So after each call the client checks for messages.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from tailrace.transfer.wire.calls import Beside, Call, Operation, Outcome, Step, nothing
from tailrace.transfer.wire.client import ClientBase, Exchange
from tailrace.transfer.wire.connection import Connection, Then
from tailrace.transfer.wire.sockets import readable

T = TypeVar("T")


class _LoopConnection(Connection):
    """A connection that an event loop drives, from `drive` on."""

    _loop: asyncio.AbstractEventLoop
    _tick_s: float
    _after_tick: Callable[[], None]
    _timer: asyncio.TimerHandle | None = None

    def drive(self, tick_s: float, after_tick: Callable[[], None]) -> None:
        """Let the running loop drive this. While a request waits, `after_tick` is called every `tick_s` seconds."""
        self._tick_s, self._after_tick = tick_s, after_tick
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket.fileno(), self._receive)

    def start(self, call: Call, then: Then, *, held: bool = False) -> int:
        """See `Connection.start`."""
        number = super().start(call, then, held=held)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._on_timer)
        self._look()
        return number

    def cancel(self, number: int) -> None:
        """See `Connection.cancel`."""
        super().cancel(number)
        self._look()

    def close(self) -> None:
        """See `Connection.close`."""
        self._stop()
        super().close()

    def lose(self) -> None:
        """See `Connection.lose`."""
        self._stop()
        super().lose()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self.socket.fileno())

    def _look(self) -> None:
        if not self.socket.closed and readable(self.socket):
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        while not self.socket.closed and self.receive():
            pass

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()
        self._look()
        if not self.idle:
            self._timer = self._loop.call_later(self._tick_s, self._on_timer)
        self._after_tick()


class AsyncClient(ClientBase):
    """Carries out operations concurrently: `async with AsyncClient("rollout", token, protocol) as client: ...`.

    For one event loop. An operation that is cancelled takes back the calls that it was waiting for.
    """

    async def __aenter__(self) -> Self:
        """Return this client. It connects at the first call to each server."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close this client."""
        self.close()

    async def run(self, operation: Operation[T], *, within_s: float | None = None, beside: Beside = nothing) -> T:
        """Return the result of `operation`, which is given up after `within_s` seconds. `beside`: see `Beside`.

        Raises:
            PeerLost: the operation was given up.
            TailraceError: the operation raised it.
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
            raise self._too_late(within_s) from None
        finally:
            operation.close()
            self.tell(beside())

    async def _exchange(self, step: Step) -> list[Outcome]:
        exchange = Exchange(step)
        self._under_way.add(exchange)
        try:
            if step.pause_s:
                await asyncio.sleep(step.pause_s)
            complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            exchange.on_complete = partial(_set, complete)
            self._start(exchange)
            if exchange.missing and step.limit_s is None:
                await complete
            elif exchange.missing:
                await asyncio.wait([complete], timeout=step.limit_s)
        except BaseException:  # also when cancelled, even if the answer is there
            self._break_off(exchange)
            raise
        finally:
            self._under_way.remove(exchange)
        return self._finish(exchange)

    def _connect(self, endpoint: str) -> Connection:
        connection = self._make(_LoopConnection, endpoint)
        connection.drive(self._tick_s, self._look_after)
        return connection


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # it was not cancelled in the same turn of the loop
        future.set_result(None)
