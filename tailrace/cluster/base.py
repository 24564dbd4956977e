"""The contract between a driver and its worker processes.

    driver                                      worker process
    Cluster.start(spec) ─────────────────────▶  factory(settings, context) → Worker;  open()
    WorkerHandle.reports() ──────────────────▶  run()
                           ◀── Report, Report …   events, lines of output, or nothing: a heartbeat
    WorkerHandle.call(method, *args) ────────▶  method(*args), beside `run` and other calls
    WorkerHandle.close() ────────────────────▶  `run` is cancelled if it still runs;  close();  the process ends

Waiting: `start` waits for `open`, up to `ClusterConfig.start_limit_s`. A report comes at least every HEARTBEAT_S, so
the reader of reports knows within `heartbeat_limit_s` that a worker has died or hangs. A call waits for its method, and
ends at once when the worker dies. Nothing here replaces a dead worker: tailrace/cluster/pool.py does.
"""

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import msgspec

from tailrace.config.cluster import PoolConfig
from tailrace.errors import TailraceError, WorkerError, one_line
from tailrace.events import Event, Sink

HEARTBEAT_S = 1.0
"""The longest time between two reports of a worker, in seconds."""
CLOSE_LIMIT_S = 10.0
"""Seconds for a worker to close and end, before it is killed."""
CANCEL_LIMIT_S = 30.0
"""Seconds that the cancellation of a call waits for the method to end."""
_NOT_COMMANDS = ("open", "run", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Facts about a worker that its factory gets."""

    name: str
    """The worker's name, such as `rollout-0`."""
    address: str
    """The IP address of the worker's machine, as others of the cluster reach it."""
    datacentre: str
    """The datacentre of that machine: Ray's node label of this name, or empty."""
    emit: Sink
    """Sends an event to the driver, in the next report. It may be called from any thread."""


class Worker(ABC):
    """A program that runs in a worker process.

    `WorkerSpec.factory` names a callable `(settings: bytes, context: WorkerContext) -> Worker`. It is imported and
    called in the worker's process, after CPU cores and thread limits are set. All methods run in one event loop. Long
    computations must not run in it: a loop that stands still for `heartbeat_limit_s` is taken for dead. The worker's
    other public async methods are commands, see `WorkerHandle.call`.
    """

    notice: Callable[[], None] | None = None
    """Called when SIGTERM comes, as it does before a preemptible machine ends: the worker goes on until the driver has
    closed it. None: the process ends at once."""

    async def open(self) -> dict[str, Any]:
        """Get ready, for example load the model. Return facts about the worker for the driver.

        They consist of numbers, strings, and lists and dicts of them.
        """
        return {}

    @abstractmethod
    async def run(self) -> None:
        """Serve until the work is done. An error that this raises ends the run."""

    async def close(self) -> None:  # noqa: B027  (many have nothing to give back)
        """Release resources. It is called after `run` has ended or was cancelled, and after an `open` that raised.

        In the second case an error of `close` becomes a note on the error of `open`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start."""

    name: str
    """Unique in the run: the kind of work, a dash and a number. The only trainer is `trainer`, without a number."""
    pool: PoolConfig
    """The resources that the worker reserves, and the cores that it is bound to."""
    factory: str
    """`module:callable`, see Worker."""
    settings: bytes
    """The settings for the factory."""


class Report(msgspec.Struct, frozen=True):
    """News from a worker. An empty report is a heartbeat."""

    events: tuple[Event, ...] = ()
    """Events in the order in which they were emitted."""
    lines: tuple[str, ...] = ()
    """Lines that the worker and its children have printed, to stdout or stderr."""


class Answer(msgspec.Struct, frozen=True):
    """The result of a command, on its way to the driver."""

    value: bytes
    """The pickled result."""
    told: int
    """See `WorkerHandle.told`."""


class WorkerHandle(ABC):
    """The driver's end of one worker, used from one event loop."""

    name: str
    pid: int
    """The pid of the worker's process, on `facts["host"]`."""
    facts: dict[str, Any]
    """The facts that `Worker.open` returned and: `pid`, `host`, `address` (IP), `node` (the id of Ray's node), `keeper`
    (the pid of its actor), `datacentre` (Ray's node label of that name, or empty), `cores` (the cores that the worker
    may run on, as read back from the system)."""
    told: int = 0
    """The number of events that the worker had emitted by the end of the last call that returned. Reports bring the
    events."""

    @abstractmethod
    def reports(self) -> AsyncGenerator[Report, None]:
        """Start the worker's `run`, and yield its reports until `run` has returned. Call this only once.

        Raises:
            TailraceError: the error that `run` raised; a WorkerError for an error that is not Tailrace's.
            WorkerDied: the process ended, or it was silent for `heartbeat_limit_s` and was killed.
        """

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call the worker's async method of this name, and return its result.

        Calls run concurrently with one another and with `run`. If the caller is cancelled, the method is cancelled too,
        and the caller waits up to CANCEL_LIMIT_S until it has ended.

        Raises:
            TailraceError: the error that the method raised; a WorkerError for an error that is not Tailrace's.
            WorkerDied: the process had ended, or ended meanwhile.
        """

    @abstractmethod
    async def close(self) -> Report:
        """Let the worker close and end; kill it after CLOSE_LIMIT_S. Return the news that no report has brought.

        It raises nothing for a worker that died. Calling it twice is harmless.
        """

    @abstractmethod
    async def kill(self) -> None:
        """Kill the worker's process and all processes that it has started. Reports and calls raise WorkerDied.

        Calling it twice is harmless.
        """


class Cluster(ABC):
    """Starts workers. When its block ends in any way, no worker is left."""

    async def __aenter__(self) -> Self:
        """Get ready to start workers.

        Raises:
            ConfigError: the cluster cannot be reached, or could never hold the pools that it was made with.
        """
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    @abstractmethod
    def address(self) -> str:
        """The IP address of the driver's machine, as workers reach it."""

    @property
    @abstractmethod
    def datacentre(self) -> str:
        """The datacentre of the driver's machine: Ray's node label of this name, or empty."""

    @abstractmethod
    async def check_room(self, pools: Mapping[str, PoolConfig]) -> None:
        """Check that the cluster, were it free, could hold these pools. One that other machines may join can.

        Raises:
            ConfigError: it never could.
        """

    @abstractmethod
    async def start(self, spec: WorkerSpec, on_wait: Callable[[str], None] = lambda _: None) -> WorkerHandle:
        """Start and open a worker. If this is cancelled, the worker is killed.

        Args:
            on_wait: called with a message while the worker waits for a place, if it is not given one soon.

        Raises:
            ConfigError: the machine does not have the cores.
            ClusterError: the worker was given no place within `start_limit_s`.
            TailraceError: the error that its factory or `open` raised; a WorkerError for an error that is not
                Tailrace's.
            WorkerDied: the process ended, or was killed since it had not opened within `start_limit_s`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill every worker that is left. Calling it twice is harmless."""


async def close_unopened(worker: str, error: BaseException, close: Coroutine[Any, Any, Report]) -> None:
    """Await `close` after an `open` that raised `error`. An error of `close` becomes a note on `error`."""
    try:
        await close
    except TailraceError as failure:
        error.add_note(f"Then worker {worker} could not close: {failure}")


async def each(*work: Coroutine[Any, Any, None]) -> None:
    """Run all of `work` concurrently, each to its end. Then raise the first error."""
    ends = await asyncio.gather(*work, return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


def unheard(work: asyncio.Future[Any]) -> None:
    """Retrieve the error of `work`, as a done callback: else asyncio logs an error that no caller waits for."""
    if not work.cancelled():
        work.exception()


def is_ours(error: Exception) -> bool:
    """Whether a driver raises a worker's `error` as it is. An error class of a user's may not be picklable."""
    return isinstance(error, TailraceError) and type(error).__module__.partition(".")[0] == "tailrace"


def foreign(worker: str, error: Exception) -> WorkerError:
    """Return the error that a driver raises for a worker's `error` that is not Tailrace's."""
    return WorkerError(f"worker {worker}: {type(error).__name__}: {one_line(error)}")


def cancelled_itself(worker: str) -> WorkerError:
    """Return the error that a driver raises for work that was cancelled by the worker itself."""
    return WorkerError(f"worker {worker} cancelled itself")


def make_worker(factory: str, settings: bytes, context: WorkerContext) -> Worker:
    """Make a worker with `factory`, which is `module:callable`."""
    module, _, name = factory.partition(":")
    return cast(Worker, getattr(importlib.import_module(module), name)(settings, context))


async def call_method(worker: Worker, method: str, args: tuple[Any, ...]) -> Any:
    """Call a command of `worker` and return its result.

    Raises:
        WorkerError: the worker has no such command.
    """
    if method.startswith("_") or method in _NOT_COMMANDS or not hasattr(worker, method):
        raise WorkerError(f"{type(worker).__name__} has no command {method!r}")
    return await getattr(worker, method)(*args)


class Outbox:
    """Collects events from any thread for the reports of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self.told = 0
        """The number of events in all."""

    def emit(self, event: Event) -> None:
        """Add `event` to the next report."""
        self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self.told += 1
        self._news.set()

    async def wait(self, limit_s: float) -> None:
        """Wait until there is an event to report, `poke` was called, or `limit_s` seconds have passed."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def poke(self) -> None:
        """End the current `wait`, or the next one."""
        self._news.set()

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call."""
        self._news.clear()
        events, self._events = tuple(self._events), []
        return events
