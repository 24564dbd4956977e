"""A server's loop on a thread of its own, whose end nobody has to wait for in vain."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

from tailrace.errors import WeightsError, one_line
from tailrace.transfer.weights.bell import Bell
from tailrace.transfer.wire.server import Server, Service

T = TypeVar("T")

_LIMIT_S = 60.0
"""For the thread to do what it is asked for."""


class ServerThread:
    """Runs `server` until it is stopped, or fails. Used from any thread."""

    def __init__(self, server: Server, service: Service, bell: Bell, *, name: str, what: str) -> None:
        """Begins with `start`. `bell` rings when it has ended; `what` has ended then, for people."""
        self._server, self._service, self._bell, self._what = server, service, bell, what
        self._end: WeightsError | None = None
        self._asked: set[Future[object]] = set()
        """What `do` waits for."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run from now on."""
        self._thread.start()

    @property
    def end(self) -> WeightsError | None:
        """Why nothing comes from it any more: it was closed or has failed. A new one each time: it is raised."""
        end = self._end
        return None if end is None else again(end)

    def do(self, action: Callable[[], T]) -> T:
        """What `action` returns, or raises, in the thread.

        Raises:
            WeightsError: the thread has ended, before or meanwhile, or has not come to it in time.
        """
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more, and who did not get it may have undone what came before
            try:
                future.set_result(action())
            except WeightsError as error:
                future.set_exception(error)

        self._asked.add(future)  # type: ignore[arg-type]
        try:
            self._server.call(call)
            if (end := self.end) is not None:  # else the future is told
                raise end
            return future.result(_LIMIT_S)
        except TimeoutError:
            future.cancel()
            raise WeightsError(
                f"{self._what} has not done within {_LIMIT_S:g} s what it was asked for; is the machine overloaded?"
            ) from None
        finally:
            self._asked.discard(future)

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, at most so long."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        end = WeightsError(f"{self._what} was closed")
        try:
            self._server.run(self._service)
        except Exception as error:  # whatever it is, those that wait hear of it
            end = WeightsError(f"{self._what} failed: {type(error).__name__}: {one_line(error)}")
            end.__cause__ = error
        self._end = end
        for future in list(self._asked):
            with suppress(InvalidStateError):  # it has been told, or nobody waits for it any more
                future.set_exception(again(end))
        self._bell.ring()


def again(error: WeightsError) -> WeightsError:
    """The same error, to be raised in another place."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy
