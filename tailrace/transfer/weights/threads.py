"""Threads beside those that use weights: a server's loop, blocking work, and coroutines that wait for either.

coroutine ──wait_for──▶ Wakeups ◀──notify── thread of a server ◀──server.call── Worker: one job after the other
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from traceback import clear_frames
from typing import Generic, TypeVar

from tailrace.errors import WeightsError, one_line
from tailrace.transfer.wire.server import Server, Service

T = TypeVar("T")

_LIMIT_S = 60.0
"""The longest that `ServerThread.do` waits for an action."""


class Guarded(Generic[T]):
    """A value that threads share. One thread at a time uses it, inside `with guarded as value` alone."""

    def __init__(self, value: T) -> None:
        """Guard `value`. The caller keeps no other reference to it."""
        self._value = value
        self._lock = threading.Lock()

    def __enter__(self) -> T:
        """Wait until no other thread is inside. The block must not call anything that may wait."""
        self._lock.acquire()
        return self._value

    def __exit__(self, *_: object) -> None:
        """Let the next thread in."""
        self._lock.release()


class Wakeups:
    """Wakes coroutines when something has changed. Used from any thread and any event loop."""

    def __init__(self) -> None:
        """Start without waiting coroutines."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def notify(self) -> None:
        """Have every waiting coroutine check again."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with suppress(RuntimeError):  # the loop was closed: nobody waits there
                loop.call_soon_threadsafe(event.set)

    async def wait_for(self, check: Callable[[], T | None], *, timeout_s: float = math.inf) -> T | None:
        """Return the result of `check` as soon as it is not None; return None after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = asyncio.Event()
            entry = (asyncio.get_running_loop(), event)
            with self._lock:
                self._waiting.append(entry)
            try:
                if (found := check()) is not None:
                    return found
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await event.wait()
            except TimeoutError:
                return check()
            finally:
                with self._lock, suppress(ValueError):  # it was notified
                    self._waiting.remove(entry)


class Worker:
    """A thread that does one job after the other, and hands each outcome to the thread of `server`.

    An exit of the process waits for the current job; each job has its own limits.
    """

    def __init__(self, server: Server, name: str) -> None:
        """Run no thread before the first `start`."""
        self._server = server
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    def start(self, job: Callable[[], T], then: Callable[[T | WeightsError], None]) -> None:
        """Do `job`, then call `then` with what it returned, or with the WeightsError that it raised."""

        def ended(future: "Future[T | WeightsError]") -> None:
            self._server.call(lambda: then(future.result()))

        self._executor.submit(_done, job).add_done_callback(ended)

    def join(self) -> None:
        """Wait until all jobs are done. No job can be started afterwards."""
        self._executor.shutdown()


def _done(job: Callable[[], T]) -> T | WeightsError:
    try:
        return job()
    except WeightsError as error:
        cause: BaseException | None = error
        while cause is not None:
            clear_frames(cause.__traceback__)  # frames would keep sockets open that others wait to see closed
            cause = cause.__context__
        return WeightsError(str(error))


class ServerThread:
    """Runs `server` until it is stopped or fails. Every waiting caller gets an error when the thread ends.

    Used from any thread.
    """

    def __init__(self, server: Server, service: Service, wakeups: Wakeups, *, name: str, what: str) -> None:
        """Begin at `start`. `wakeups` are notified when the thread has ended; `what` names it in errors."""
        self._server, self._service, self._wakeups, self._what = server, service, wakeups, what
        self._end: WeightsError | None = None
        self._asked: set[Future[object]] = set()
        """The futures that `do` waits for."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def end(self) -> WeightsError | None:
        """The error after the thread was closed or has failed, else None. Each call makes a new one, to be raised."""
        end = self._end
        return None if end is None else copy_of(end)

    def do(self, action: Callable[[], T]) -> T:
        """Run `action` in the thread; return its result or raise its error.

        Raises:
            WeightsError: the thread has ended, before or meanwhile, or has not run `action` in time.
        """
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller no longer waits, and may have undone the steps before this one
            try:
                future.set_result(action())
            except WeightsError as error:
                future.set_exception(error)

        self._asked.add(future)  # type: ignore[arg-type]
        try:
            self._server.call(call)
            if (end := self.end) is not None:  # else `_run` ends the future
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
        """Wait until the thread has ended, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        end = WeightsError(f"{self._what} was closed")
        try:
            self._server.run(self._service)
        except Exception as error:  # those that wait must hear of any failure
            end = WeightsError(f"{self._what} failed: {type(error).__name__}: {one_line(error)}")
            end.__cause__ = error
        self._end = end
        for future in list(self._asked):
            with suppress(InvalidStateError):  # it has a result, or no caller waits any more
                future.set_exception(copy_of(end))
        self._wakeups.notify()


def copy_of(error: WeightsError) -> WeightsError:
    """Copy an error, to be raised in another place."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy
