"""A running unit on a storage of each kind, with a controller that records."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.queue.storage.arena import ArenaStorage, ArenaView
from tailrace.transfer.queue.storage.base import Storage
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.queue.storage.spill import SpillStorage
from tailrace.transfer.queue.unit.service import StorageUnit
from tailrace.transfer.wire.server import Server
from tests.transfer.unit.controller import Client, Recorder
from tests.transfer.wire.desk import TOKEN, serving

MAX_BYTES = 400_000
SILENCE_S = 1000.0
NAMES = count()


@dataclass
class Running:
    """A unit in a thread."""

    endpoint: str
    controller: Recorder
    service: StorageUnit
    storage: Storage

    @property
    def view(self) -> ArenaView:
        """The unit's memory, as a client sees it."""
        assert isinstance(self.storage, ArenaStorage)
        return ArenaView(self.storage.directory)


@contextmanager
def running(storage: Storage, clock: Callable[[], float] = time.monotonic) -> Iterator[Running]:
    """Run a unit that has joined a controller of its own. The storage is closed at the end."""
    controller, recorder = Server("controller", TOKEN, QUEUE), Recorder()
    unit = Server("unit", TOKEN, QUEUE, silence_s=SILENCE_S, clock=clock)
    service = StorageUnit(unit, storage, name="unit", controller=controller.endpoints[0], max_bytes=MAX_BYTES)
    with serving(controller, recorder), serving(unit, service):
        recorder.wait_for(lambda: bool(recorder.joins))
        yield Running(unit.endpoints[0], recorder, service, storage)
    storage.close()


def make_storage(kind: str, directory: Path, name: str, redis_url: Callable[[], str]) -> Storage:
    match kind:
        case "memory":
            return MemoryStorage(max_bytes=MAX_BYTES)
        case "arena":
            return ArenaStorage(parent=directory, max_bytes=MAX_BYTES, segment_bytes=100_000)
        case "spill":
            return SpillStorage(directory=directory, memory_bytes=1000, max_bytes=MAX_BYTES)
    url = redis_url()
    from tailrace.transfer.queue.storage.redis import RedisStorage

    return RedisStorage(url=url, name=name, timeout_s=10, max_bytes=MAX_BYTES)


@pytest.fixture(params=["memory", "arena", "spill", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Make storages of MAX_BYTES and one name, of each kind in turn."""
    name = f"unit-{next(NAMES)}"
    return lambda: make_storage(request.param, tmp_path, name, lambda: str(request.getfixturevalue("redis_url")))


@pytest.fixture
def unit(make: Callable[[], Storage]) -> Iterator[Running]:
    """A running unit on a storage of each kind in turn."""
    with running(make()) as made:
        yield made


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Running]:
    with running(ArenaStorage(parent=tmp_path, max_bytes=MAX_BYTES)) as made:
        yield made


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of `arena` if the test has it, else of `unit`."""
    made: Running = request.getfixturevalue("arena" if "arena" in request.fixturenames else "unit")
    with Client(made.endpoint) as opened:
        yield opened
