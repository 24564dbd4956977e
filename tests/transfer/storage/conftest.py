"""Storages of every kind, small, and a Redis server of their own."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.base import Storage
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.queue.storage.spill import SpillStorage
from tests.transfer.storage.machine import MAX_BYTES

Make = Callable[[str], Storage]
"""A storage for a queue of that name."""


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that keeps nothing on disk, behind a Unix socket."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    socket = tmp_path_factory.mktemp("redis") / "socket"
    where = ["--port", "0", "--dir", str(socket.parent), "--unixsocket", str(socket)]
    command = [program, *where, "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        limit = Timer(30, server.kill)
        limit.start()
        assert any("ready to accept" in line for line in iter(server.stdout.readline, "")), "it did not start"
        limit.cancel()
        yield f"unix://{socket}"
        server.terminate()
        server.wait(timeout=10)


@pytest.fixture(params=["memory", "arena", "spill", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes storages of MAX_BYTES, of each kind in turn."""
    match request.param:
        case "memory":
            return lambda name: MemoryStorage(max_bytes=MAX_BYTES)
        case "arena":
            return lambda name: ArenaStorage(parent=tmp_path, max_bytes=MAX_BYTES, segment_bytes=64)
        case "spill":
            return lambda name: SpillStorage(directory=tmp_path, memory_bytes=48, max_bytes=MAX_BYTES)
    url = request.getfixturevalue("redis_url")
    from tailrace.transfer.queue.storage.redis import RedisStorage

    return lambda name: RedisStorage(url=url, name=name, timeout_s=10, max_bytes=MAX_BYTES)


@pytest.fixture
def storage(make: Make, request: pytest.FixtureRequest) -> Iterator[Storage]:
    """A storage of MAX_BYTES, of each kind in turn."""
    made = make(request.node.name)
    yield made
    made.close()
