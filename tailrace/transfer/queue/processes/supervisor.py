"""The processes of a queue: a controller and storage units, which are started again when they die.

    directory/connection.json ◀── address ── QueueProcesses ──starts, watches──▶ controller ◀──Join── unit-0, unit-1, …
              journal         ◀─────────────────────────────────────────────────────┘
              *.log           ◀── what each of them prints

A controller that is started again has the endpoints and the journal of the one before, a unit its name: clients and
units find them again. One that died before it could serve is started again after a pause; one that has not said for
long that its loop turns is killed. When too many have died, or the journal is gone, all are ended.

The plan says what shall run (`plan`), and the vitals who has died (`vitals`).

Who waits on whom: a thread of its own starts all of them and then hears them until `stop`. Whoever enters waits until
the controller has heard from all units, and nobody for longer than a limit. Processes whose parent dies end by
themselves.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.config.queue_table import TableConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import PeerLost, QueueError, TailraceError, UserError, one_line
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.look import read_stats
from tailrace.transfer.queue.processes.child import KILLED_LIMIT_S, Child
from tailrace.transfer.queue.processes.plan import CONTROLLER, QueuePlan
from tailrace.transfer.queue.processes.serve import Failed, Listening
from tailrace.transfer.queue.processes.vitals import START_LIMIT_S, Vitals

_LOOK_S = 0.05
"""Between looks at which units have joined, once all of them serve: only the controller knows, and tells when asked."""
_LOOK_LIMIT_S = 5.0
_END_LIMIT_S = 10.0
"""For all processes to end by themselves, with the message in hand and their files."""

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
        self._plan = QueuePlan(config, table, directory, resume=resume)
        self._directory = directory
        self._vitals = Vitals()
        self._children: dict[str, Child] = {}
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
        return self._plan.address

    @property
    def connection(self) -> Path:
        """The file that holds the address."""
        return self._plan.connection

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
        limit_s = _LOOK_LIMIT_S + START_LIMIT_S + _END_LIMIT_S + KILLED_LIMIT_S * (1 + len(self._plan.units))
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
                stack.enter_context(self._plan.prepared())
                stack.callback(self._end)
                stack.push(self._leave)  # whoever waits for the queue hears of it before the processes end
                self._start(CONTROLLER)
                while self._turn():
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

    def _turn(self) -> bool:
        """Wait for something to do and do it; False when it was to stop."""
        for name in self._vitals.due:
            self._start(name)
        children = {self._children[name].fileno(): self._children[name] for name in self._vitals.running}
        for ready in wait([self._wake, *children], self._patience_s):
            if not isinstance(ready, int):
                return False
            self._hear(children[ready])
        for name, limit_s in self._vitals.silent().items():
            self._children[name].kill(f"killed, since it had given no sign of life for {limit_s:g} s")
        if not self._ready.is_set():
            self._check_ready()
        return True

    @property
    def _patience_s(self) -> float:
        return _LOOK_S if self._all_serve and not self._ready.is_set() else self._vitals.patience_s

    @property
    def _all_serve(self) -> bool:
        return {CONTROLLER, *self._plan.units} <= {*self._vitals.listening}

    def _hear(self, child: Child) -> None:
        messages = child.hear()
        self._vitals.hear(child.name)
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
        self._vitals.listen(child.name)
        if child.name == CONTROLLER and self._plan.publish(endpoints):
            for unit in self._plan.units:
                self._start(unit)

    def _replace(self, child: Child) -> None:
        """Have a process started anew that has died.

        Raises:
            QueueError: too many have, or one while the queue starts that never came to listen, or the journal is gone.
        """
        obituary = child.obituary()
        if child.name == CONTROLLER and self._plan.has_lost_journal:
            raise QueueError(
                f"{obituary}; its journal {self._plan.journal} was removed or emptied meanwhile, so nobody knows which "
                f"rows were consumed: given up; serve another directory, and go on from a checkpoint"
            )
        if not self._ready.is_set() and child.name not in self._vitals.listening:
            raise QueueError(obituary)
        pause_s = self._vitals.die(child.name, obituary)
        _log.warning("%s; it is started again %s", obituary, f"in {pause_s:g} s" if pause_s else "now")

    def _start(self, name: str) -> None:
        self._children[name] = Child(name, self._plan.settings(name), self._plan.log(name))
        self._vitals.start(name)

    def _check_ready(self) -> None:
        """Set `_ready` once the controller has heard from all units.

        Raises:
            QueueError: it takes too long.
        """
        if self._all_serve:
            with suppress(PeerLost):  # it has died meanwhile, and is started again
                units = read_stats(self.address, name="queue processes", limit_s=_LOOK_LIMIT_S).units
                if sum(unit.alive for unit in units) >= len(self._plan.units):
                    return self._ready.set()
        if self._vitals.is_late:
            missing = sorted({CONTROLLER, *self._children} - {*self._vitals.listening}) or ["a unit that joins"]
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
