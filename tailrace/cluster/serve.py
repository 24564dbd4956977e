"""The process of one worker: `python -m tailrace.cluster.serve NAME PARENT DESCRIPTOR`, started by a guard.

Messages (tailrace/cluster/wire.py) are exchanged over the socket DESCRIPTOR; output goes to the keeper's pipe. The
worker's own event loop sends the beats: if they stop, the worker stands still. The kernel kills this process when its
parent, the guard (tailrace/cluster/guard.py), ends.
"""

import asyncio
import os
import pickle
import signal
import socket
import sys
import traceback
from asyncio import StreamReader, StreamWriter, Task
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from tailrace.cluster.base import HEARTBEAT_S, Outbox, Worker, WorkerContext, call_method, make_worker
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
    ToKeeper,
    pack_error,
    read_to_worker,
)
from tailrace.errors import ConfigError
from tailrace.host.cpu import usable_cores
from tailrace.host.descendants import signal_at_end_of_parent
from tailrace.host.frames import frame
from tailrace.host.streams import replace_unencodable, warn_in_one_line

_BATCH_S = 0.2
"""Events within this time, in seconds, go in one message."""


def main() -> None:
    """Serve until a Close arrives, or until the keeper is gone."""
    replace_unencodable()
    warn_in_one_line()
    parent, descriptor = int(sys.argv[2]), int(sys.argv[3])
    signal_at_end_of_parent(signal.SIGKILL)
    os.set_inheritable(descriptor, False)
    if os.getppid() != parent:
        return  # the parent ended before the kernel was told to signal its end
    # Ray blocks SIGINT. A terminal's Ctrl-C does not reach this process: the guard has a session of its own.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    start = await read_to_worker(reader)
    if isinstance(start, Start):
        await _Serving(start, reader, writer).serve()
    writer.close()


class _Serving:
    """A worker, and the exchange of messages with its keeper."""

    def __init__(self, start: Start, reader: StreamReader, writer: StreamWriter) -> None:
        self._start = start
        self._reader = reader
        self._writer = writer
        self._outbox = Outbox()
        self._worker: Worker | None = None
        self._work: dict[int, Task[Any]] = {}
        """The running work: calls by their ids, `open` and `run`."""
        self._answers: set[Task[None]] = set()
        """The tasks that wait for the end of some work and send its answer."""

    async def serve(self) -> None:
        beats = asyncio.create_task(self._beat())
        beats.add_done_callback(_end_if_failed)
        self._begin(OPEN, self._open())
        while not isinstance(message := await read_to_worker(self._reader), Close | None):
            match message:
                case Run():
                    assert self._worker is not None
                    self._begin(RUN, self._worker.run())
                case Call(id, method, args):
                    self._begin(id, self._call(method, args))
                case Cancel(id):
                    if id in self._work:  # else it has ended, and its answer is on the way
                        self._work[id].cancel()
        beats.cancel()
        await self._answer(CLOSE, asyncio.create_task(self._close()))

    def _begin(self, id: int, work: Coroutine[Any, Any, Any]) -> None:
        self._work[id] = asyncio.create_task(work)
        self._work[id].add_done_callback(lambda _: self._work.pop(id))
        answer = asyncio.create_task(self._answer(id, self._work[id]))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        answer.add_done_callback(_end_if_failed)

    async def _answer(self, id: int, work: Task[Any]) -> None:
        """Wait for the end of `work` and send its answer.

        This task is never cancelled itself, so work that is cancelled before it has begun is answered too.
        """
        await asyncio.wait([work])
        try:
            await self._tell_events()  # its events are sent before its answer
            answer: ToKeeper = Returned(id, value=pickle.dumps(work.result()))
        except asyncio.CancelledError:
            answer = Returned(id, cancelled=True)
        except Exception as error:  # the driver gets every error
            answer = Returned(id, error=pack_error(self._start.name, error))
        await self._send(answer)

    async def _open(self) -> dict[str, Any]:
        start = self._start
        bind(start.cores)
        self._worker = make_worker(
            start.factory,
            start.settings,
            WorkerContext(name=start.name, address=start.address, datacentre=start.datacentre, emit=self._outbox.emit),
        )
        facts = await self._worker.open()
        if self._worker.notice is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._worker.notice)
        return facts | {"pid": os.getpid(), "cores": usable_cores()}

    async def _call(self, method: str, args: bytes) -> Any:
        assert self._worker is not None
        return await call_method(self._worker, method, pickle.loads(args))

    async def _close(self) -> None:
        for work in self._work.values():
            work.cancel()
        if self._answers:
            await asyncio.wait(list(self._answers))
        if self._worker is not None:
            await self._worker.close()

    async def _beat(self) -> None:
        while True:
            await self._outbox.wait(HEARTBEAT_S)
            await asyncio.sleep(_BATCH_S)
            await self._send(Beat(self._outbox.take()))

    async def _tell_events(self) -> None:
        await asyncio.sleep(0)  # another thread's events come in the next round of the loop
        if events := self._outbox.take():
            await self._send(Beat(events))

    async def _send(self, message: ToKeeper) -> None:
        with suppress(ConnectionError):  # the keeper is gone, and this process will end
            self._writer.write(frame(message))
            await self._writer.drain()


def _end_if_failed(telling: Task[None]) -> None:
    """End the process with a traceback if `telling` failed, so that the driver does not miss beats or answers."""
    if not telling.cancelled() and (error := telling.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def bind(cores: tuple[int, ...] | None) -> None:
    """Bind this process, and every thread that is made from now on, to `cores`. None: leave it as it is.

    Raises:
        ConfigError: the machine does not have one of the cores, or this process may not use it.
    """
    if cores is None:
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
        missing = set(cores) - os.sched_getaffinity(0)
    except OSError:  # none of the cores can be used
        missing = set(cores)
    if missing:
        os.sched_setaffinity(0, before)
        raise ConfigError(
            f"cores {sorted(missing)} cannot be had on {socket.gethostname()}, which has {sorted(before)}; "
            "change `cores` of the worker's pool in `cluster`"
        )


if __name__ == "__main__":
    main()
