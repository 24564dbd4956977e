"""The processes of a queue: a controller and storage units, which are restarted when they die.

    directory/connection.json ◀── address ── QueueProcesses ──starts, watches──▶ controller ◀──Join── unit-0, unit-1, …
              journal         ◀─────────────────────────────────────────────────────┘
              *.log           ◀── the output of each process

A restarted controller has the endpoints and the journal of the one before, and a restarted unit has its name: so
clients and units find them again. A unit that has left on purpose is not restarted. With `max_units`, another unit is
started when the others are nearly full, and leaves when they have plenty of room (`planning.queue_units`). A process
that died before it served is restarted after a pause. A process that has not reported for long that its loop turns is
killed. When too many have died, or the journal is gone, all are ended.

The plan has the settings of the processes (`plan`), and the vitals record which have died (`vitals`).

Waiting: a thread starts all processes and then hears them until `stop`. Entering the block waits until the controller
has heard from all units. Every wait has a limit. Processes whose parent dies end by themselves.
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
from tailrace.host.children import EXIT_LIMIT_S
from tailrace.planning.queue_units import Stored, wanted
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.look import read_stats, retire_unit
from tailrace.transfer.queue.processes.child import KILLED_LIMIT_S, Child
from tailrace.transfer.queue.processes.plan import CONTROLLER, Place, QueuePlan
from tailrace.transfer.queue.processes.serve import Failed, Left, Listening
from tailrace.transfer.queue.processes.vitals import START_LIMIT_S, Vitals
from tailrace.transfer.wire.clock import LONGEST_STEP_S

_ALONE = Place()
_LOOK_S = 0.05
"""Seconds between questions to the controller whether all units have joined, once all processes serve."""
_LOOK_LIMIT_S = 5.0
"""Seconds for the controller to answer such a question."""
_SIZE_EVERY_S = 1.0
"""Seconds between looks at how full the units are, where their number may change."""
_SIZE_LIMIT_S = LONGEST_STEP_S
"""Seconds for the controller to tell, or to let a unit leave. Nobody is heard meanwhile, and the clock of the signs of
life counts no more of a step: with a longer limit, a controller that hangs would be killed too late for clients."""
_GROW_AGAIN_S = 60.0
"""Seconds after another unit could not be started."""
_END_LIMIT_S = 10.0
"""Seconds for all processes to end by themselves, with the message in hand and their files."""

_log = logging.getLogger(__name__)


class QueueProcesses:
    """The processes of a queue. They run in the block of a `with` or `async with`."""

    def __init__(
        self,
        config: ServiceQueueConfig,
        table: TableConfig,
        directory: Path,
        *,
        resume: bool = False,
        place: Place = _ALONE,
    ) -> None:
        """`directory`: made if it is missing. `place`: of the controller, where `several` starts more than one.

        `resume`: whether to go on with the journal, the token and the endpoints that an earlier start has left there,
        and to leave everything for the next one. Otherwise the queue begins empty, and its stored data is removed when
        it ends.
        """
        self._plan = QueuePlan(config, table, directory, resume=resume, place=place)
        self._directory = directory
        self._vitals = Vitals()
        self._children: dict[str, Child] = {}
        self._ready = threading.Event()
        self._failure: TailraceError | None = None
        self._on_given_up: Callable[[], object] | None = None
        self._size_at = 0.0
        """When to look next how full the units are."""
        self._leaving: set[str] = set()
        """The spare units that were told to leave."""
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._supervise, name="queue processes", daemon=True)

    def __enter__(self) -> Self:
        """Start all processes.

        Raises:
            UserError: the directory cannot be used, or another process serves a queue there.
            QueueError: rows cannot pass through the table, or a process cannot serve.
        """
        self.begin()
        self.await_start()
        return self

    def begin(self) -> None:
        """Begin to start all processes."""
        self._thread.start()

    def await_start(self) -> None:
        """Wait until all processes have started. Errors: see `__enter__`."""
        self._ready.wait()  # the thread has the limit
        self._check_started()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes.

        Raises:
            QueueError: the queue had been given up, which explains any error in the block.
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
        """The address of the queue."""
        return self._plan.address

    @property
    def connection(self) -> Path:
        """The file that holds the address."""
        return self._plan.connection

    @property
    def pids(self) -> dict[str, int]:
        """The pid of each process by name: `controller`, `unit-0`, ... It changes with a restart."""
        return {name: child.pid for name, child in self._children.copy().items()}

    def stop(self) -> None:
        """Begin to end all processes. It may be called from any thread or signal handler."""
        with suppress(OSError):  # they have ended already
            self._waker.send(b"!")

    def wait(self) -> None:
        """Wait until `stop`, or until the queue is given up; then `__exit__` raises the reason."""
        self._thread.join()

    def on_given_up(self, then: Callable[[], object]) -> None:
        """Call `then` when the queue is given up: in the supervising thread, before the processes are ended."""
        self._on_given_up = then

    def _check_started(self) -> None:
        if self._failure is not None:
            self._join()
            raise self._failure

    def _join(self) -> None:
        if self._thread.ident is None:  # it has not been started
            return
        limit_s = _LOOK_LIMIT_S + START_LIMIT_S + _END_LIMIT_S + KILLED_LIMIT_S * (1 + len(self._plan.units))
        self._thread.join(limit_s)
        if self._thread.is_alive():
            _log.error("the processes of the queue have not ended within %g s: %s", limit_s, self.pids)

    def _supervise(self) -> None:
        """Run the processes: the main function of the thread. A failure is kept for `__enter__` and `__exit__`."""
        with ExitStack() as stack:
            stack.push(self._leave)
            stack.callback(self._waker.close)
            stack.callback(self._wake.close)
            try:
                stack.enter_context(self._plan.prepared())
                stack.callback(self._end)
                stack.push(self._leave)  # a caller that waits for the queue learns of it before the processes end
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
        """End the thread. An unexpected error gives up the queue; its traceback is printed."""
        if error is not None and self._failure is None:
            self._give_up(QueueError(f"the thread of the queue's processes has failed: {one_line(error)}"))
        self._ready.set()

    def _turn(self) -> bool:
        """Wait for something to do, and do it. Return False after `stop`."""
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
        elif self._plan.can_grow and time.monotonic() >= self._size_at:
            self._size_at = time.monotonic() + _SIZE_EVERY_S
            self._resize()
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
                case Left():
                    self._forget(child)
                    _log.info("%s has left the queue", child.name)
        if not messages:
            self._replace(child)

    def _listen_to(self, child: Child, endpoints: list[str]) -> None:
        """Record that a process serves. When the first controller does, start the units."""
        self._vitals.listen(child.name)
        if child.name == CONTROLLER and self._plan.publish(endpoints):
            for unit in self._plan.units:
                self._start(unit)

    def _forget(self, child: Child) -> None:
        """Forget a unit that has left the queue, or that was started later and cannot serve: it is not restarted."""
        child.end(EXIT_LIMIT_S)
        self._vitals.leave(child.name)
        del self._children[child.name]
        if self._plan.is_spare(child.name):
            self._plan.forget_unit(child.name)
            self._leaving.discard(child.name)

    def _replace(self, child: Child) -> None:
        """Schedule the restart of a process that has died.

        Raises:
            QueueError: too many processes have died, this one died at the queue's start before it listened, or the
                journal is gone.
        """
        obituary = child.obituary()
        if child.name == CONTROLLER and self._plan.has_lost_journal:
            raise QueueError(
                f"{obituary}; its journal {self._plan.journal} was removed or emptied meanwhile, so nobody knows which "
                f"rows were consumed: given up; serve another directory, and go on from a checkpoint"
            )
        if not self._ready.is_set() and child.name not in self._vitals.listening:
            raise QueueError(obituary)
        if self._plan.is_spare(child.name) and child.name not in self._vitals.listening:
            _log.warning("%s; the queue goes on without it, and tries again in %g s", obituary, _GROW_AGAIN_S)
            self._size_at = time.monotonic() + _GROW_AGAIN_S
            return self._forget(child)
        self._leaving.discard(child.name)  # it joins as any other; there is another look at whether it is to leave
        pause_s = self._vitals.die(child.name, obituary)
        _log.warning("%s; it is started again %s", obituary, f"in {pause_s:g} s" if pause_s else "now")

    def _start(self, name: str) -> None:
        self._children[name] = Child(name, self._plan.settings(name), self._plan.log(name))
        self._vitals.start(name)

    def _resize(self) -> None:
        """Start another unit, or have the newest one leave, where the rows that are stored call for it."""
        # the controller has died meanwhile, or all others are to leave: there is another look
        with suppress(PeerLost, UserError):
            stats = read_stats(self.address, name="queue processes", limit_s=_SIZE_LIMIT_S)
            own = [name for name in self._plan.units if name in self._children]
            there = {unit.name: unit for unit in stats.units if unit.alive}
            if self._leaving or not there.keys() >= {*own}:
                return  # one is on its way, or is restarted
            added = [name for name in there if name not in own]  # with `tailrace queue add-unit`
            units = [Stored(there[name].bytes, there[name].max_bytes) for name in (*added, *own)]
            spare = list(filter(self._plan.is_spare, own))
            least, most = self._plan.least_units, self._plan.max_units
            match wanted(units, puts_wait=stats.blocked_puts > 0, least=least, most=most):
                case "add":
                    self._add_unit()
                case "release" if spare:
                    retire_unit(self.address, spare[-1], limit_s=_SIZE_LIMIT_S)
                    self._leaving.add(spare[-1])

    def _add_unit(self) -> None:
        """Start another unit. Where that fails, the queue goes on without it."""
        try:
            name = self._plan.add_unit()
            _log.info("%s is started, since the others are nearly full", name)
            try:
                self._start(name)
            except QueueError:
                self._plan.forget_unit(name)
                raise
        except (QueueError, OSError) as error:
            _log.warning("another unit cannot be started, and is tried again in %g s: %s", _GROW_AGAIN_S, error)
            self._size_at = time.monotonic() + _GROW_AGAIN_S

    def _check_ready(self) -> None:
        """Set `_ready` once the controller has heard from all units.

        Raises:
            QueueError: it takes too long.
        """
        if self._all_serve:
            with suppress(PeerLost):  # the controller has died meanwhile, and is restarted
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
