"""What may block, beside a server's thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from traceback import clear_frames
from typing import TypeVar

from tailrace.errors import WeightsError
from tailrace.transfer.wire.server import Server

T = TypeVar("T")


class Jobs:
    """A thread that does one thing after the other, and tells the thread of `server` how each has ended.

    An exit of the process waits for the job in hand; each has limits of its own.
    """

    def __init__(self, server: Server, name: str) -> None:
        """No thread before the first `start`."""
        self._server = server
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    def start(self, job: Callable[[], T], then: Callable[[T | WeightsError], None]) -> None:
        """Do `job`, and call `then` with what it returned, or the WeightsError that it raised."""

        def ended(future: "Future[T | WeightsError]") -> None:
            self._server.call(lambda: then(future.result()))

        self._executor.submit(_done, job).add_done_callback(ended)

    def join(self) -> None:
        """Wait until all are done; no other can be started."""
        self._executor.shutdown()


def _done(job: Callable[[], T]) -> T | WeightsError:
    try:
        return job()
    except WeightsError as error:
        cause: BaseException | None = error
        while cause is not None:
            clear_frames(cause.__traceback__)  # they would hold on to sockets, and others wait for these to be closed
            cause = cause.__context__
        return WeightsError(str(error))
