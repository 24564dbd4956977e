"""A Redis server of the tests' own."""

import shutil
import subprocess
from collections.abc import Iterator
from threading import Timer

import pytest


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
