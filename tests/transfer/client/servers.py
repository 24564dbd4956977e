"""A queue whose controller and units run in threads of the test, each with sockets of its own."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.controller.journal import Journal
from tailrace.transfer.queue.controller.service import Controller
from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.base import Storage
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.queue.unit.service import StorageUnit
from tailrace.transfer.wire.server import Server, Service
from tailrace.transfer.wire.sockets import DEFAULT_ENDPOINTS, host_id
from tests.transfer.tables import table

TOKEN = b"a token that nobody guesses"
LIMIT_S = 20.0
MAX_BYTES = 64 * 2**20

Make = Callable[[Path], Storage]
"""A function that makes a storage with its files in a directory."""


def memory(directory: Path) -> Storage:
    return MemoryStorage(max_bytes=MAX_BYTES)


def arena(directory: Path) -> Storage:
    return ArenaStorage(parent=directory, max_bytes=MAX_BYTES, segment_bytes=4 * 2**20)


class Served:
    """A running queue: its address, and its storages to look into."""

    def __init__(
        self,
        address: QueueAddress,
        controller: Server,
        storages: Sequence[Storage],
        stops: Sequence[Callable[[], None]],
        units: Sequence[str] = (),
    ) -> None:
        self.address = address
        self.storages = storages
        self.units = units
        """The endpoints of the units."""
        self._controller = controller
        self._stops = stops

    def end_turn(self) -> None:
        """End the controller's turn: later requests are answered after it has done what is due by now.

        An answer alone does not prove it: the controller may take in further messages before it looks at its clock.
        """
        taken_in = threading.Event()
        self._controller.call(taken_in.set)
        assert taken_in.wait(LIMIT_S), "the controller does not go on"

    def stop_unit(self, number: int) -> None:
        """Stop a unit without a word to its peers."""
        self._stops[number]()


@contextmanager
def serving(
    directory: Path,
    *,
    make: Make = arena,
    units: int = 1,
    tasks: Sequence[QueueTask] | None = None,
    columns: Mapping[str, ColumnKind] = COLUMNS,
    endpoints: Sequence[str] = DEFAULT_ENDPOINTS,
    clock: Callable[[], float] | None = None,
    listen: Callable[..., Server] = Server,
    controllers: int = 1,
    **config: Any,
) -> Iterator[Served]:
    """Serve a queue, by default with the table `table`. It is ready when the block begins.

    Args:
        directory: The place of its files.
        make: Makes the storage of each unit.
        units: The number of units.
        tasks: The tasks of another table.
        columns: The columns of the table.
        endpoints: Where the servers listen.
        clock: The clock of the controller.
        listen: Makes the servers.
        controllers: The controllers of the queue, of which this is one.
        config: Keys of `ServiceQueueConfig`.
    """
    with ExitStack() as stack:
        server = listen("controller", TOKEN, QUEUE, endpoints=endpoints, clock=clock)
        settings = ServiceQueueConfig.model_validate({"units": units, **config})
        journal = Journal(directory / "journal")
        controller = Controller(
            server, tasks or table(), settings, columns=columns, journal=journal, controllers=controllers
        )
        stack.enter_context(_running(server, controller))
        storages, stops, where_units = [], [], []
        address = QueueAddress(endpoints=server.endpoints, host=host_id(), token=TOKEN)
        with SyncQueue(address, name="waiting") as queue:
            for number in range(units):
                storage = make(directory)
                stack.callback(storage.close)
                unit = listen(f"unit-{number}", TOKEN, QUEUE, endpoints=endpoints)
                where = server.endpoints[0]
                service = StorageUnit(
                    unit, storage, name=f"unit-{number}", controller=where, max_bytes=MAX_BYTES, join_every_s=0.05
                )
                storages.append(storage)
                where_units.append(unit.endpoints[-1])
                stops.append(stack.enter_context(_running(unit, service)))
                while sum(unit.alive for unit in queue.stats().units) <= number:
                    pass  # one after the other, so that the number of each is its index here
        yield Served(address, server, storages, stops, where_units)


@contextmanager
def serving_several(
    directory: Path, tasks: Callable[[], Sequence[QueueTask]], *, controllers: int = 2, **options: Any
) -> Iterator[tuple[QueueAddress, list[Served]]]:
    """Serve a queue of several controllers. `tasks`: makes those of each. `options`: see `serving`."""
    with ExitStack() as stack:
        parts = []
        for number in range(controllers):
            (own := directory / f"{number}").mkdir()
            parts.append(stack.enter_context(serving(own, tasks=tasks(), controllers=controllers, **options)))
        yield joined([part.address for part in parts]), parts


def joined(addresses: Sequence[QueueAddress]) -> QueueAddress:
    """The address of a queue with these controllers."""
    first, *others = addresses
    return msgspec.structs.replace(first, others=[address.endpoints for address in others])


@contextmanager
def _running(server: Server, service: Service) -> Iterator[Callable[[], None]]:
    thread = threading.Thread(target=server.run, args=(service,))

    def stop() -> None:
        server.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the server does not stop"

    thread.start()
    try:
        yield stop
    finally:
        stop()
