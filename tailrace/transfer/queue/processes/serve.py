"""The program of one process of a queue, which `QueueProcesses` starts as `python -m MODULE PARENT DESCRIPTOR`.

    parent ──settings──▶ process ──Listening──▶ parent
                                 ──Turning────▶           each second from then on
                                 ──Failed─────▶           instead, or later: why it ends
                                 ──Left───────▶           in the end, from a unit that left the queue on purpose

Messages are JSON lines over the socket DESCRIPTOR, so the token is on no command line. The socket also tells either
side that the other has ended. A parent that ends in any way leaves no process behind: a thread waits until the other
end is closed, or until the parent is gone while a process that it forked holds that end.
"""

import gc
import logging
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tailrace.errors import TailraceError
from tailrace.host.interrupt import handling
from tailrace.transfer.queue.controller.journal import Journal, JournalError
from tailrace.transfer.queue.controller.service import Controller
from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.queue.storage.factory import make_storage
from tailrace.transfer.queue.unit.service import StorageUnit
from tailrace.transfer.wire.server import Server, Service, stopped_by_signals

if TYPE_CHECKING:
    from tailrace.config.transfer import StorageConfig

LOG_FORMAT, LOG_TIME = "%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"
_WATCH_MS = 1000
_STOP_LIMIT_S = 5.0
"""Seconds to finish the message in hand, once the parent is gone."""

_log = logging.getLogger(__name__)


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True, tag="controller"):
    """The settings of the controller's process."""

    token: bytes
    endpoints: list[str]
    """The endpoints at which to listen."""
    table: str
    """A TableConfig as JSON."""
    config: str
    """A ServiceQueueConfig as JSON."""
    journal: str
    """The path of the journal."""
    controllers: int
    """The controllers of the queue, of which this is one."""


class UnitSettings(msgspec.Struct, frozen=True, kw_only=True, tag="unit"):
    """The settings of a storage unit's process."""

    token: bytes
    endpoints: list[str]
    """The endpoints at which to listen."""
    name: str
    controller: str
    """The endpoint of the controller."""
    storage: Mapping[str, Any]
    """A StorageConfig by its keys."""
    storage_name: str
    """See `make_storage`."""
    join_every_s: float
    """Seconds between the unit's signs of life."""
    patience_s: float | None = None
    """Seconds without an answer of the controller after which it ends; None: as long as its parent lives."""


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The process serves from now on."""

    endpoints: list[str]


class Turning(msgspec.Struct, frozen=True, tag="turning"):
    """The process's loop turns. A process that is stopped or hangs does not send this."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process cannot serve, or cannot go on."""

    reason: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The unit has left the queue: its rows are on others, and it is not to be started again."""


Message = Listening | Turning | Failed | Left


def main() -> None:
    """Serve until a signal, or until the parent hangs up. A unit leaves the queue at a signal."""
    parent, descriptor = map(int, sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_TIME)  # to stderr, which is the log
    _raise_descriptor_limit()
    with socket.socket(fileno=descriptor) as channel, ExitStack() as stack:
        with channel.makefile("rb") as lines:
            settings = msgspec.json.decode(lines.readline(), type=ControllerSettings | UnitSettings)
        try:
            server, service = _make(settings, stack)
            threading.Thread(target=_watch, args=(parent, channel, server), daemon=True).start()
            with _by_signals(server, service):
                channel.sendall(msgspec.json.encode(Listening(server.endpoints)) + b"\n")
                server.run(service)
        except (TailraceError, JournalError) as error:
            with suppress(ConnectionError):  # if the parent is gone
                channel.sendall(msgspec.json.encode(Failed(str(error))) + b"\n")
            sys.exit(1)  # the parent writes the reason into the log
        if isinstance(service, StorageUnit) and service.has_left:
            with suppress(ConnectionError):
                channel.sendall(msgspec.json.encode(Left()) + b"\n")
    _log.info("%s ends: %s", server.name, server.stopped_by)


def _by_signals(server: Server, service: Service) -> AbstractContextManager[None]:
    """At SIGTERM or SIGINT the controller stops, and a unit leaves the queue. A second one stops a unit."""
    if not isinstance(service, StorageUnit):
        return stopped_by_signals(server)
    asked = False

    def leave(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            server.stop(signal.Signals(number).name)
        asked = True
        server.call(service.leave)

    return handling((signal.SIGINT, signal.SIGTERM), leave)


def _raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors: each client takes some, and ZeroMQ ends the process without one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _make(settings: ControllerSettings | UnitSettings, stack: ExitStack) -> tuple[Server, Service]:
    # Hundreds of thousands of rows live for long: to search them for garbage often finds nothing.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    match settings:
        case ControllerSettings():
            # slow, and units do without the schemas
            from tailrace.config.queue_table import TableConfig
            from tailrace.config.transfer import ServiceQueueConfig
            from tailrace.transfer.queue.table_factory import make_tasks

            table = TableConfig.model_validate_json(settings.table)
            config = ServiceQueueConfig.model_validate_json(settings.config)
            tasks = make_tasks(table, controllers=settings.controllers)
            journal = Journal(Path(settings.journal))
            stack.callback(journal.close)
            server = Server("controller", settings.token, QUEUE, endpoints=settings.endpoints)
            controller = Controller(
                server, tasks, config, columns=table.columns, journal=journal, controllers=settings.controllers
            )
            return server, controller
        case UnitSettings():
            storage_config = cast("StorageConfig", SimpleNamespace(**settings.storage))
            storage = make_storage(storage_config, name=settings.storage_name)
            stack.callback(storage.close)
            server = Server(settings.name, settings.token, QUEUE, endpoints=settings.endpoints)
            unit = StorageUnit(
                server,
                storage,
                name=settings.name,
                controller=settings.controller,
                max_bytes=storage_config.max_bytes,
                join_every_s=settings.join_every_s,
                patience_s=math.inf if settings.patience_s is None else settings.patience_s,
            )
            return server, unit


def _watch(parent: int, channel: socket.socket, server: Server) -> None:
    """Have the server's loop tell the parent that it turns, and stop the server when the parent ends."""
    turning = msgspec.json.encode(Turning()) + b"\n"

    def tell() -> None:
        with suppress(BlockingIOError, ConnectionError):  # the parent is stopped and its buffer full, or it is gone
            channel.send(turning, socket.MSG_DONTWAIT)

    poll = select.poll()
    poll.register(channel, 0)  # reports a hang-up and nothing else
    while os.getppid() == parent and not poll.poll(_WATCH_MS):
        server.call(tell)
    server.stop("its parent has hung up, or is gone")
    time.sleep(_STOP_LIMIT_S)
    os._exit(1)  # the message in hand does not end; without a parent, nothing else would stop this process


if __name__ == "__main__":
    try:
        main()
    except ConnectionError:
        _log.info("ends before it has served: its parent has hung up, or is gone")
