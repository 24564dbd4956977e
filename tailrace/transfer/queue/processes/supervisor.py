"""The processes of a queue: a controller and storage units, which are started again when they die.

    directory/connection.json ◀── address ── QueueProcesses ──starts, watches──▶ controller ◀──Join── unit-0, unit-1, …
              journal         ◀─────────────────────────────────────────────────────┘
              *.log           ◀── what each of them prints

A controller that is started again has the endpoints and the journal of the one before, a unit its name: clients and
units find them again. One that died before it could serve is started again after a pause; one that has not said for
long that its loop turns is killed. When too many have died, or the journal is gone, all are ended.

Who waits on whom: a thread of its own starts all of them and then hears them until `stop`. Whoever
enters waits until the controller has heard from all units, and nobody for longer than a limit. Processes whose parent
dies end by themselves.
"""

import asyncio
import fcntl
import hashlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.config.queue_table import TableConfig
from tailrace.config.transfer import ArenaStorageConfig, ServiceQueueConfig
from tailrace.errors import PeerLost, QueueError, TailraceError, UserError, one_line
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.look import read_stats
from tailrace.transfer.queue.processes.child import KILLED_LIMIT_S, Child
from tailrace.transfer.queue.processes.preflight import check_service
from tailrace.transfer.queue.processes.serve import ControllerSettings, Failed, Listening, UnitSettings
from tailrace.transfer.queue.rows.table import check_table
from tailrace.transfer.queue.storage.arena import remove_orphans
from tailrace.transfer.queue.storage.factory import clear_storage
from tailrace.transfer.queue.table_factory import make_tasks
from tailrace.transfer.socket_directory import directory_of, socket_directory
from tailrace.transfer.wire.clock import RunningClock
from tailrace.transfer.wire.sockets import host_id

MAX_DEATHS, DEATHS_WITHIN_S = 5, 600.0
"""Processes that may die within this time, all together; one more and the queue is given up. One that hangs again and
again dies after START_LIMIT_S each time."""
_RESTART_PAUSE_S = 2.0
"""Before a process is started again that could not serve: its port may be free by then."""
START_LIMIT_S = 60.0
"""For all to be there, on a busy machine."""
_SILENCE_LIMIT_S = 20.0
"""Without a sign of life from one that serves. Clients give it up after 30 s: it has been started again by then."""
_HEAR_S = 0.5
"""Between looks at who is silent."""
_LOOK_S = 0.05
"""Between looks at which units have joined, while the queue starts: only the controller knows, and tells when asked."""
_LOOK_LIMIT_S = 5.0
_JOIN_EVERY_S = 1.0
"""Between signs of life of a unit."""
_END_LIMIT_S = 10.0
"""For all processes to end by themselves, with the message in hand and their files."""

CONTROLLER = "controller"

_log = logging.getLogger(__name__)


class QueueProcesses:
    """The processes, from `with` (or `async with`) on until the end of the block."""

    def __init__(
        self, config: ServiceQueueConfig, table: TableConfig, directory: Path, *, resume: bool = False
    ) -> None:
        """`directory`: made where it is missing. `resume`: go on with the journal, the token and the endpoints that an
        earlier start has left there, and leave everything to the next one; otherwise the queue begins empty, and what
        it has stored goes when it ends.
        """
        self._config = config
        self._table = table
        self._directory = directory
        self._journal = directory / "journal"
        self._resume = resume
        self._children: dict[str, Child] = {}
        self._listening: set[str] = set()
        self._has_served = False
        """Whether there has been a controller that could serve, and so a journal."""
        self._deaths: deque[float] = deque()
        self._due: dict[str, float] = {}
        """When those are started again that wait for it."""
        self._clock = RunningClock()
        self._heard: dict[str, float] = {}
        """When each one was, or was started, on that clock."""
        self._starts = 0
        self._address: QueueAddress | None = None
        self._ready = threading.Event()
        self._failure: TailraceError | None = None
        self._on_given_up: Callable[[], object] | None = None
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._supervise, name="queue processes", daemon=True)

    def __enter__(self) -> Self:
        """Start all of them.

        Raises:
            UserError: the directory cannot be used, or another process serves a queue there.
            QueueError: the table is not one that rows can pass through, or a process cannot serve.
        """
        self._thread.start()
        self._ready.wait()  # the thread has the limit
        self._check_started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all of them.

        Raises:
            QueueError: the queue had been given up, which explains whatever went wrong in the block.
        """
        self.stop()
        self._join()
        if self._failure is not None and (error is None or isinstance(error, Exception)):
            raise self._failure

    async def __aenter__(self) -> Self:
        """See `__enter__`."""
        self._thread.start()
        try:
            await asyncio.to_thread(self._ready.wait)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.to_thread(self._join)
            raise
        self._check_started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `__exit__`."""
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    @property
    def address(self) -> QueueAddress:
        """Where the queue is."""
        assert self._address is not None, "the processes have been started"
        return self._address

    @property
    def connection(self) -> Path:
        """The file that holds the address."""
        return self._directory / "connection.json"

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that there are now: `controller`, `unit-0`, ...; another one after a restart."""
        return {name: child.pid for name, child in self._children.copy().items()}

    def stop(self) -> None:
        """Begin to end all of them. From any thread or signal handler."""
        with suppress(OSError):  # they have ended
            self._waker.send(b"!")

    def wait(self) -> None:
        """Until `stop`, or until the queue is given up; `__exit__` says which."""
        self._thread.join()

    def on_given_up(self, then: Callable[[], object]) -> None:
        """Have `then` called in the thread of the processes, before they are ended, when the queue is given up."""
        self._on_given_up = then

    def _check_started(self) -> None:
        if self._failure is not None:
            self._join()
            raise self._failure

    def _join(self) -> None:
        limit_s = _LOOK_LIMIT_S + START_LIMIT_S + _END_LIMIT_S + KILLED_LIMIT_S * (1 + self._config.units)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            _log.error("the processes of the queue have not ended within %g s: %s", limit_s, self.pids)

    def _supervise(self) -> None:
        """The thread. What goes wrong is kept for who enters and who leaves."""
        with ExitStack() as stack:
            stack.push(self._leave)
            stack.callback(self._waker.close)
            stack.callback(self._wake.close)
            try:
                check_table(make_tasks(self._table), self._table.columns)
                check_service(self._config)
                stack.enter_context(_locked(self._directory))
                if not self._resume:
                    self._journal.unlink(missing_ok=True)
                before = QueueAddress.read(self.connection) if self._resume and self.connection.exists() else None
                again = None if before is None else directory_of(before.endpoints)
                self._sockets = stack.enter_context(socket_directory(again))
                self._address = self._plan(before)
                stack.callback(self._clear)
                stack.callback(self._end)
                stack.push(self._leave)  # whoever waits for the queue hears of it before the processes end
                self._start(CONTROLLER)
                deadline = time.monotonic() + START_LIMIT_S
                while self._turn(deadline):
                    pass
                if not self._ready.is_set():
                    raise QueueError("the queue was stopped while it started")
            except TailraceError as error:
                self._give_up(error)
            except OSError as error:
                self._give_up(UserError(f"the queue's directory {self._directory} cannot be used: {error.strerror}"))

    def _give_up(self, failure: TailraceError) -> None:
        self._failure = failure
        if self._on_given_up is not None:
            self._on_given_up()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The thread ends; with an error that nobody foresaw, which its traceback explains."""
        if error is not None and self._failure is None:
            self._give_up(QueueError(f"the thread of the queue's processes has failed: {one_line(error)}"))
        self._ready.set()

    def _plan(self, before: QueueAddress | None) -> QueueAddress:
        """Where the controller shall listen: where that of an earlier start did, if there was one."""
        port = f"tcp://{self._config.listen}:"
        others = [] if before is None else before.endpoints
        tcp = next((endpoint for endpoint in others if endpoint.startswith(port)), f"{port}*")
        token = secrets.token_bytes(32) if before is None else before.token
        return QueueAddress(endpoints=[f"ipc://{self._sockets}/{CONTROLLER}", tcp], host=host_id(), token=token)

    def _turn(self, deadline: float) -> bool:
        """Wait for something to do and do it; False when it was to stop."""
        for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
            self._start(name)
        children = {child.fileno(): child for child in self._children.values() if child.name not in self._due}
        for ready in wait([self._wake, *children], self._patience()):
            if not isinstance(ready, int):
                return False
            self._hear(children[ready])
        self._kill_silent()
        if not self._ready.is_set():
            self._check_ready(deadline)
        return True

    def _patience(self) -> float:
        """Seconds until there is something to do that nobody says."""
        if not self._ready.is_set():
            return _LOOK_S
        return max(0.0, min([time.monotonic() + _HEAR_S, *self._due.values()]) - time.monotonic())

    def _hear(self, child: Child) -> None:
        messages = child.hear()
        self._heard[child.name] = self._clock()
        for message in messages:
            match message:
                case Listening(endpoints):
                    self._listen_to(child, endpoints)
                case Failed(reason) if not self._ready.is_set():
                    raise QueueError(reason)
        if not messages:
            self._replace(child)

    def _listen_to(self, child: Child, endpoints: list[str]) -> None:
        """It serves from now on; the first time a controller does, start the units."""
        self._listening.add(child.name)
        self._has_served |= child.name == CONTROLLER
        if child.name == CONTROLLER and len(self._children) == 1:
            self._address = QueueAddress(endpoints=endpoints, host=host_id(), token=self.address.token)
            self._address.write(self.connection)
            for number in range(self._config.units):
                self._start(f"unit-{number}")

    def _kill_silent(self) -> None:
        """Who was stopped or hangs hears of nothing else, and is replaced when it has ended."""
        now = self._clock()
        for name in self._children.keys() - self._due.keys():
            limit_s = _SILENCE_LIMIT_S if name in self._listening else START_LIMIT_S
            if now - self._heard[name] > limit_s:
                self._children[name].kill(f"killed, since it had given no sign of life for {limit_s:g} s")

    def _replace(self, child: Child) -> None:
        """Start a process anew that has died, one that never came to listen after a pause.

        Raises:
            QueueError: too many have, or one while the queue starts that never came to listen, or the journal is gone.
        """
        now, obituary = time.monotonic(), child.obituary()
        if child.name == CONTROLLER and self._has_served and not _has_bytes(self._journal):
            raise QueueError(
                f"{obituary}; its journal {self._journal} was removed or emptied meanwhile, so nobody knows which rows "
                f"were consumed: given up; serve another directory, and go on from a checkpoint"
            )
        if not self._ready.is_set() and child.name not in self._listening:
            raise QueueError(obituary)
        while self._deaths and self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > MAX_DEATHS:
            raise QueueError(
                f"{obituary}; with it, {len(self._deaths)} of its processes have within {DEATHS_WITHIN_S:g} s: given up"
            )
        pause_s = 0.0 if child.name in self._listening else _RESTART_PAUSE_S
        _log.warning("%s; it is started again %s", obituary, f"in {pause_s:g} s" if pause_s else "now")
        self._due[child.name] = now + pause_s

    def _start(self, name: str) -> None:
        self._due.pop(name, None)
        self._listening.discard(name)
        settings = self._controller_settings() if name == CONTROLLER else self._unit_settings(name)
        self._children[name] = Child(name, settings, self._directory / f"{name}.log")
        self._heard[name] = self._clock()

    def _controller_settings(self) -> ControllerSettings:
        return ControllerSettings(
            token=self.address.token,
            endpoints=self.address.endpoints,
            table=self._table.model_dump_json(),
            config=self._config.model_dump_json(),
            journal=str(self._journal),
        )

    def _unit_settings(self, name: str) -> UnitSettings:
        self._starts += 1
        return UnitSettings(
            token=self.address.token,
            # a socket of its own, so that nobody takes it for the unit before it
            endpoints=[f"ipc://{self._sockets}/{name}-{self._starts}", f"tcp://{self._config.listen}:*"],
            name=name,
            controller=self.address.endpoint,
            storage=self._config.storage.model_dump_json(),
            storage_name=self._storage_name(name),
            join_every_s=min(_JOIN_EVERY_S, self._config.unit_limit_s / 4),
        )

    def _storage_name(self, unit: str) -> str:
        queue = hashlib.sha256(self.address.token).hexdigest()[:16]  # the same after a restart, and no other queue's
        return f"tailrace-{queue}-{unit}"

    def _clear(self) -> None:
        """What the units have stored in a server goes with a queue that does not go on."""
        if self._resume:
            return
        try:
            for number in range(self._config.units):
                clear_storage(self._config.storage, name=self._storage_name(f"unit-{number}"))
        except QueueError as error:
            _log.warning("what the queue has stored is left there: %s", error)

    def _check_ready(self, deadline: float) -> None:
        """Set `_ready` once the controller has heard from all units.

        Raises:
            QueueError: it takes too long.
        """
        if len(self._listening) == 1 + self._config.units:
            with suppress(PeerLost):  # it has died meanwhile, and is started again
                units = read_stats(self.address, name="queue processes", limit_s=_LOOK_LIMIT_S).units
                if sum(unit.alive for unit in units) >= self._config.units:
                    return self._ready.set()
        if time.monotonic() > deadline:
            missing = sorted({CONTROLLER, *self._children} - self._listening) or ["a unit that joins"]
            raise QueueError(
                f"the queue was not ready within {START_LIMIT_S:g} s: "
                f"it lacks {missing[0]}, see the logs in {self._directory}"
            )

    def _end(self) -> None:
        for child in self._children.values():
            child.hang_up()
        deadline = time.monotonic() + _END_LIMIT_S
        for child in self._children.values():
            child.end(max(0.0, deadline - time.monotonic()))
        if isinstance(self._config.storage, ArenaStorageConfig):
            remove_orphans(self._config.storage.path)  # what units had that were killed


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Make the directory and hold it for this queue.

    Raises:
        UserError: another queue is served there.
        OSError: it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process serves a queue in {directory}; stop it or choose another") from None
        yield


def _has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
