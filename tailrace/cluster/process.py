"""The keeper's end of one worker process.

    keeper                          guard (guard.py), worker (serve.py)
    WorkerProcess ──socket────────▶ worker: messages, see wire.py
                  ◀─socket───────── worker: answers; a beat every HEARTBEAT_S, with events
                  ◀─pipe─────────── the output of the worker, of its children and of C code
                  ◀─lifeline─────── guard: how the worker ended

The keeper is an actor of Ray, and the worker does not use Ray. So a worker that hangs holds up nothing else. How it
ended is known exactly, and its last output arrives even if the kernel killed it.
"""

import asyncio
import itertools
import os
import socket
import subprocess
from asyncio import Future, StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Self

import psutil

from tailrace.cluster.base import (
    CANCEL_LIMIT_S,
    CLOSE_LIMIT_S,
    HEARTBEAT_S,
    Answer,
    Report,
    WorkerSpec,
    cancelled_itself,
    close_unopened,
)
from tailrace.cluster.output import Output
from tailrace.cluster.wire import (
    CLOSE,
    OPEN,
    RUN,
    Beat,
    Call,
    Cancel,
    Close,
    Returned,
    Run,
    Start,
    ToWorker,
    read_to_keeper,
    unpack_error,
)
from tailrace.errors import TailraceError, WorkerDied, how_ended
from tailrace.events import Event
from tailrace.host.children import last_output, python_module
from tailrace.host.frames import frame

_BATCH_S = 0.5
"""Lines and events within this time, in seconds, go in one report: a report costs several processes milliseconds."""
_GUARD_LIMIT_S = 60.0
"""Seconds for a Python process to start, on a busy machine with a slow disk."""
_END_LIMIT_S = 10.0
"""Seconds for a killed worker to be gone. It takes milliseconds; a process stuck in the kernel is left alone."""
_DRAIN_LIMIT_S = 1.0
"""Seconds for the last output and messages of a dead worker to arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """The connections to a guard and its worker."""

    lifeline: tuple[StreamReader, StreamWriter]
    messages: tuple[StreamReader, StreamWriter]
    output: StreamReader
    group: int
    """The process group of the guard and the worker."""


class WorkerProcess:
    """A worker in a separate process on this machine, and all processes that it starts. Make it with `start`."""

    def __init__(self, name: str, child: _Child) -> None:
        self.name = name
        self.pid = 0
        self._child = child
        self._ids = itertools.count(1)
        self._answers: dict[int, Future[Returned | None]] = {}
        self._events: list[Event] = []
        self._told = 0
        """The number of events that the worker has sent."""
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()
        """Set if the next report must not wait for more news."""
        self._output = Output(child.output, self._news.set)
        self._heard = 0.0
        """The time of the worker's last message, on the clock of the loop."""
        self._how = ""
        """The reason why this process ended the worker, if it did; then how it ended."""
        self._dead = False
        self._watching: asyncio.Task[None] | None = None
        self._life = asyncio.create_task(self._live())

    @classmethod
    async def start(
        cls,
        spec: WorkerSpec,
        *,
        environment: Mapping[str, str],
        directory: str,
        address: str,
        datacentre: str,
        start_limit_s: float,
        heartbeat_limit_s: float,
    ) -> tuple[Self, bytes]:
        """Start and open a worker. Return it, and the pickled facts about it.

        `environment`: the environment variables of the process. `directory`: its working directory, if this machine has
        one of that name. `address`, `datacentre`: see WorkerContext.

        Raises: see `Cluster.start`.
        """
        try:
            child = await _spawn(spec, environment, directory)
        except OSError as error:
            raise WorkerDied.of(spec.name, 0, f"no process could be started: {error.strerror}") from None
        worker = cls(spec.name, child)
        try:
            start = Start(
                name=spec.name,
                factory=spec.factory,
                settings=spec.settings,
                cores=spec.pool.cores,
                address=address,
                datacentre=datacentre,
            )
            facts = await worker._open(start, start_limit_s)
        except BaseException as error:
            if isinstance(error, TailraceError) and not isinstance(error, WorkerDied):
                await close_unopened(spec.name, error, worker.close())
            await worker.kill()
            raise
        worker._watching = asyncio.create_task(worker._watch(heartbeat_limit_s))
        return worker, facts

    async def _open(self, start: Start, limit_s: float) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask(OPEN, start)
        except TimeoutError:
            await self.kill(f"killed, since it had not opened within {limit_s:g} s")
            raise self._obituary() from None

    async def reports(self) -> AsyncGenerator[Report, None]:
        """Yield the worker's reports; see `WorkerHandle.reports`."""
        run = asyncio.create_task(self._ask(RUN, Run()))
        run.add_done_callback(lambda _: self._hurry())
        has_ended = False
        try:
            while not has_ended:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._news.wait()
                        async with asyncio.timeout(_BATCH_S):
                            await self._urgent.wait()
                has_ended = run.done()  # asked before the report: a run that ends while the reader has it needs another
                yield self._report()
        finally:
            run.cancel()  # the reader has stopped
            await asyncio.wait([run])
        await run

    def _hurry(self) -> None:
        self._news.set()
        self._urgent.set()

    def _report(self) -> Report:
        self._news.clear()
        self._urgent.clear()
        events, self._events = tuple(self._events), []
        return Report(events=events, lines=self._output.take())

    async def call(self, method: str, args: bytes) -> Answer:
        """Call a command with pickled arguments; see `WorkerHandle.call`."""
        id = next(self._ids)
        value = await self._ask(id, Call(id, method, args))
        if self._events:
            self._hurry()  # the caller may wait for the events
        return Answer(value, self._told)

    async def close(self) -> Report:
        """Close the worker; see `WorkerHandle.close`."""
        if self._watching is not None:  # closing has a limit of its own, and the worker sends no beats meanwhile
            self._watching.cancel()
        self._how = self._how or "it was closed"
        try:
            with suppress(TimeoutError, WorkerDied):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self._ask(CLOSE, Close())
                    await asyncio.wait([self._life])
        finally:
            await self.kill()
        return self._report()

    async def kill(self, how: str = "killed") -> None:
        """Kill the worker; see `WorkerHandle.kill`. `how`: the reason, for the error."""
        self._how = self._how or how
        with suppress(OSError):  # the guard has ended
            self._child.lifeline[1].write_eof()
        await asyncio.wait([self._life], timeout=_END_LIMIT_S)
        if not self._life.done():  # the guard stands still: it was stopped
            _kill_group(self._child.group)
            await asyncio.wait([self._life], timeout=_END_LIMIT_S)

    async def _ask(self, id: int, message: ToWorker) -> bytes:
        if self._dead:
            raise self._obituary()
        answer = self._answers[id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(message)
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            if isinstance(message, Run | Call):  # a caller that gives up an open or a close kills the worker next
                await self._send(Cancel(id))
                await asyncio.wait([answer], timeout=CANCEL_LIMIT_S)
            raise
        finally:
            del self._answers[id]
        returned: Returned | None = answer.result()
        if returned is None or (returned.cancelled and self._how):  # cancelled by `close`
            raise self._obituary()
        if returned.cancelled:
            raise cancelled_itself(self.name)
        if returned.error:
            raise unpack_error(returned.error)
        return returned.value

    async def _send(self, message: ToWorker) -> None:
        writer = self._child.messages[1]
        with suppress(ConnectionError):  # the worker has ended: `_live` ends the wait for an answer
            writer.write(frame(message))
            await writer.drain()

    async def _live(self) -> None:
        """Hear the worker until it has ended and its last messages and output have come. Then end all waiting calls."""
        lifeline = self._child.lifeline[0]
        self.pid = int(await lifeline.readline() or 0)
        hearing = asyncio.create_task(self._hear())
        code = await lifeline.readline()
        await asyncio.wait([hearing], timeout=_DRAIN_LIMIT_S)
        hearing.cancel()
        await self._output.finish(_DRAIN_LIMIT_S)
        self._how = self._how or (how_ended(int(code)) if code else "its guard was killed")
        self._dead = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(None)
        for _, writer in (self._child.lifeline, self._child.messages):
            writer.close()

    async def _hear(self) -> None:
        while (message := await read_to_keeper(self._child.messages[0])) is not None:
            self._heard = asyncio.get_running_loop().time()
            match message:
                case Beat(events):
                    self._events += events
                    self._told += len(events)
                    if events:
                        self._news.set()
                case Returned(id):
                    if id in self._answers and not self._answers[id].done():
                        self._answers[id].set_result(message)

    async def _watch(self, limit_s: float) -> None:
        """Kill the worker when it is silent. A keeper that was held up first reads the messages that came meanwhile."""
        time = asyncio.get_running_loop().time
        while not self._dead:
            await asyncio.sleep(max(self._heard + limit_s - time(), 0.0))
            await asyncio.sleep(min(HEARTBEAT_S, limit_s))
            if time() - self._heard > limit_s:
                await self.kill(f"killed, since it had given no sign of life for {limit_s:g} s")

    def _obituary(self) -> WorkerDied:
        return WorkerDied.of(self.name, self.pid, f"{self._how}{last_output(self._output.last)}")


def _kill_group(group: int) -> None:
    """Kill the processes of a group, and all that they have started, as the guard would."""
    family: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group:
                family |= {process, *process.children(recursive=True)}
    for process in family:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or belongs to another user now
            process.kill()


async def _spawn(spec: WorkerSpec, environment: Mapping[str, str], directory: str) -> _Child:
    loop = asyncio.get_running_loop()
    messages, their_messages = socket.socketpair()
    lifeline, their_lifeline = socket.socketpair()
    output, their_output = os.pipe()
    worker = (*python_module("tailrace.cluster.serve", "-u"), spec.name, str(their_messages.fileno()))
    starter = subprocess.Popen(
        [*python_module("tailrace.cluster.guard"), str(their_lifeline.fileno()), *worker],
        stdin=DEVNULL,
        stdout=their_output,
        stderr=STDOUT,
        pass_fds=[their_messages.fileno(), their_lifeline.fileno()],
        cwd=directory if Path(directory).is_dir() else None,
        env=environment,
        start_new_session=True,  # so that Ctrl-C reaches the driver alone: it may save work before the workers end
    )
    for theirs in (their_messages, their_lifeline):
        theirs.close()
    os.close(their_output)
    try:
        await asyncio.to_thread(starter.wait, _GUARD_LIMIT_S)  # the starter ends once it has forked the guard
    except subprocess.TimeoutExpired:
        starter.kill()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(starter.wait, _END_LIMIT_S)
        for ours in (messages, lifeline):
            ours.close()
        os.close(output)
        raise WorkerDied.of(spec.name, 0, f"its guard had not started within {_GUARD_LIMIT_S:g} s") from None
    reader = StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb"))
    return _Child(
        lifeline=await asyncio.open_connection(sock=lifeline),
        messages=await asyncio.open_connection(sock=messages),
        output=reader,
        group=starter.pid,
    )
