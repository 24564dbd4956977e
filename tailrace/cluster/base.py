"""The contract between a driver and its worker processes.

    driver                                      worker process
    Cluster.start(spec) ─────────────────────▶  factory(settings, context) → Worker;  open()
    WorkerHandle.reports() ──────────────────▶  run()
                           ◀── Report, Report …   events, lines of output, or nothing: a heartbeat
    WorkerHandle.call(method, *args) ────────▶  method(*args), beside `run` and other calls
    WorkerHandle.close() ────────────────────▶  `run` is cancelled if it still goes;  close();  the process ends

Who waits on whom: `start` waits for `open`, at most `ClusterConfig.start_limit_s`. A report comes every HEARTBEAT_S at
the latest, so whoever reads them knows within `heartbeat_limit_s` that a worker has died or hangs. A call waits for its
method and ends at once when the worker dies. Nothing here replaces a dead worker: tailrace/cluster/pool.py does.
"""

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import msgspec

from tailrace.config.cluster import PoolConfig
from tailrace.errors import TailraceError, WorkerError, one_line
from tailrace.events import Event, Sink

HEARTBEAT_S = 1.0
"""A worker reports this often at the least."""
CLOSE_LIMIT_S = 10.0
"""A worker that is asked to close and has not ended by then is killed."""
CANCEL_LIMIT_S = 30.0
"""How long the cancellation of a call waits for the method to end."""
WAITED_FOR = "has not started yet, and is waited for"
"""What is said of a worker that takes its time."""
_NOT_COMMANDS = ("open", "run", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker is told about itself."""

    name: str
    """Such as `rollout-0`."""
    address: str
    """IP address of its machine, as others of the cluster reach it."""
    datacentre: str
    """Where that is: Ray's node label of this name, or empty."""
    emit: Sink
    """Takes an event to the driver, in the next report. May be called from any thread."""


class Worker(ABC):
    """What runs in a process of its own.

    `WorkerSpec.factory` names a callable `(settings: bytes, context: WorkerContext) -> Worker`. It is imported and
    called in the worker's process, whose CPU cores and thread limits are set by then. All methods run in one event
    loop, of which long computations must keep off: a loop that stands still for `heartbeat_limit_s` is taken for dead.
    Its other public async methods are commands, see `WorkerHandle.call`.
    """

    async def open(self) -> dict[str, Any]:
        """Get ready, load the model; facts about itself for the driver: numbers, strings, lists and dicts of them."""
        return {}

    @abstractmethod
    async def run(self) -> None:
        """Serve until the work is done. What it raises ends the run."""

    async def close(self) -> None:  # noqa: B027  (many have nothing to give back)
        """Give back what it holds. Comes after `run` has ended or was cancelled, and after an `open` that raised.

        What it raises after that is a note on the error of `open`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start."""

    name: str
    """Unique in the run: the kind of work, a dash and a number; without those `trainer`, of which there is one."""
    pool: PoolConfig
    """What it reserves, and where it is bound."""
    factory: str
    """`module:callable`, see Worker."""
    settings: bytes
    """For the factory."""


class Report(msgspec.Struct, frozen=True):
    """What a worker has to say; a report of nothing is a heartbeat."""

    events: tuple[Event, ...] = ()
    """In the order in which they were emitted."""
    lines: tuple[str, ...] = ()
    """What it and its children have printed, to stdout or stderr, a line each."""


class Answer(msgspec.Struct, frozen=True):
    """What a command has returned, on its way to the driver."""

    value: bytes
    """Pickled."""
    told: int
    """See `WorkerHandle.told`."""


class WorkerHandle(ABC):
    """The driver's end of one worker. Used from one event loop."""

    name: str
    pid: int
    """Of the worker's process, on `facts["host"]`."""
    facts: dict[str, Any]
    """What its `open` returned and: `pid`, `host`, `address` (IP), `node` (the id of Ray's node), `keeper` (the pid of
    its actor), `datacentre` (Ray's node label of that name, or empty), `cores` (that it may run on, as read back from
    the system)."""
    told: int = 0
    """Events that the worker had emitted in all by the end of the newest call that has returned. Reports bring them."""

    @abstractmethod
    def reports(self) -> AsyncGenerator[Report, None]:
        """Let the worker `run`, and hear from it until that has returned. Once only.

        Raises:
            TailraceError: what `run` raised; a WorkerError if that was none of Tailrace's.
            WorkerDied: its process ended, or it has not been heard of for `heartbeat_limit_s` and was killed.
        """

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """The result of the worker's async method of this name. Calls run beside one another, and beside `run`.

        The cancellation of the caller cancels the method, and waits until it has ended (at most CANCEL_LIMIT_S).

        Raises:
            TailraceError: what the method raised; a WorkerError if that was none of Tailrace's.
            WorkerDied: its process ended, before or meanwhile.
        """

    @abstractmethod
    async def close(self) -> Report:
        """Let it close and end; kill it after CLOSE_LIMIT_S. Never raises for a worker that died; twice is harmless.

        Returns what it has had to say since nobody has read its reports any more.
        """

    @abstractmethod
    async def kill(self) -> None:
        """End the process at once, with what it has started. Reports and calls raise WorkerDied. Twice is harmless."""


class Cluster(ABC):
    """Starts workers. When its block ends, however it does, none of them is left."""

    async def __aenter__(self) -> Self:
        """Be ready to start workers.

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
        """IP address of the driver's machine, as workers reach it."""

    @property
    @abstractmethod
    def datacentre(self) -> str:
        """Where that machine is: Ray's node label of this name, or empty."""

    @abstractmethod
    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """A worker that is open. Cancelling this kills it.

        Raises:
            ConfigError: the machine has no such cores.
            ClusterError: it was given no place within `start_limit_s`.
            TailraceError: what its factory or `open` raised; a WorkerError if that was none of Tailrace's.
            WorkerDied: its process ended, or was killed since it had not opened within `start_limit_s`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill every worker that is left. Twice is harmless."""


async def close_unopened(worker: str, error: BaseException, close: Coroutine[Any, Any, Report]) -> None:
    """Do `close` after the `error` of an `open`, which is what is told."""
    try:
        await close
    except TailraceError as failure:
        error.add_note(f"Then worker {worker} could not close: {failure}")


async def each(*work: Coroutine[Any, Any, None]) -> None:
    """Do it side by side, all of it to its end. The first error is raised then."""
    ends = await asyncio.gather(*work, return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


def unheard(work: asyncio.Future[Any]) -> None:
    """For `add_done_callback`, where nobody waits for the end of `work` any more: an error is not told as forgotten."""
    if not work.cancelled():
        work.exception()


def is_ours(error: Exception) -> bool:
    """Whether a driver raises a worker's `error` as it is. A class of a user's may be one that cannot be pickled."""
    return isinstance(error, TailraceError) and type(error).__module__.partition(".")[0] == "tailrace"


def foreign(worker: str, error: Exception) -> WorkerError:
    """What a driver raises for a worker's error that is none of Tailrace's."""
    return WorkerError(f"worker {worker}: {type(error).__name__}: {one_line(error)}")


def cancelled_itself(worker: str) -> WorkerError:
    """What a driver raises for work that was cancelled, and not by the driver."""
    return WorkerError(f"worker {worker} cancelled itself")


def make_worker(factory: str, settings: bytes, context: WorkerContext) -> Worker:
    """The worker that `factory`, `module:callable`, makes."""
    module, _, name = factory.partition(":")
    return cast(Worker, getattr(importlib.import_module(module), name)(settings, context))


async def call_method(worker: Worker, method: str, args: tuple[Any, ...]) -> Any:
    """The result of one command of `worker`."""
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
        """Events in all."""

    def emit(self, event: Event) -> None:
        """Take `event`, to report it soon."""
        self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self.told += 1
        self._news.set()

    async def wait(self, limit_s: float) -> None:
        """Until there is something to report, `poke` was called, or `limit_s` have passed."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def poke(self) -> None:
        """End the waiting."""
        self._news.set()

    def take(self) -> tuple[Event, ...]:
        """The events since the last time."""
        self._news.clear()
        events, self._events = tuple(self._events), []
        return events
