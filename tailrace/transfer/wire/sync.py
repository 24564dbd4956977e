"""The client of a process that does one thing at a time: a call blocks until its replies are there, or its limit."""

import math
import time
from types import TracebackType
from typing import Self, TypeVar

import zmq

from tailrace.transfer.wire.calls import Beside, Operation, Outcome, Step, nothing
from tailrace.transfer.wire.client import ClientBase, Exchange
from tailrace.transfer.wire.connection import Connection

T = TypeVar("T")


class SyncClient(ClientBase):
    """Carries out operations one after the other: `with SyncClient("trainer", token, protocol) as client: ...`.

    For one thread. It is silent between calls, so a caller that holds a lease has to renew it.
    """

    def __enter__(self) -> Self:
        """Return this client. It connects at the first call to each server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close this client."""
        self.close()

    def run(self, operation: Operation[T], *, within_s: float | None = None, beside: Beside = nothing) -> T:
        """Return the result of `operation`, which is given up after `within_s` seconds. `beside`: see `Beside`.

        Raises:
            PeerLost: the operation was given up.
            TailraceError: the operation raised it.
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
            raise self._too_late(within_s) from None
        finally:
            operation.close()
            self.tell(beside())

    def _exchange(self, step: Step, deadline: float) -> list[Outcome]:
        exchange = Exchange(step)
        try:
            if step.pause_s:
                _sleep(step.pause_s, deadline)
            self._start(exchange)
            ends_at = math.inf if step.limit_s is None else time.monotonic() + step.limit_s
            while exchange.missing and time.monotonic() < ends_at:
                if time.monotonic() >= deadline:
                    raise TimeoutError
                self._turn(ends_at)
        except BaseException:  # also at Ctrl-C
            self._break_off(exchange)
            raise
        return self._finish(exchange)

    def _turn(self, ends_at: float) -> None:
        sockets = [(connection.socket, zmq.POLLIN) for connection in self._connections.values()]
        wait_s = min(self._tick_s, max(0.0, ends_at - time.monotonic()))
        if zmq.zmq_poll(sockets, math.ceil(wait_s * 1000)):
            for connection in self._connections.values():
                connection.receive()
        for connection in self._connections.values():
            connection.tick()
        self._look_after()

    def _connect(self, endpoint: str) -> Connection:
        return self._make(Connection, endpoint)


def _sleep(seconds: float, deadline: float) -> None:
    left = deadline - time.monotonic()
    time.sleep(max(0.0, min(seconds, left)))
    if seconds >= left:
        raise TimeoutError
