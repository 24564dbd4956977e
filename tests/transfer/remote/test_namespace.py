"""A client at the other end of a real network of 10 Mbit/s, whose link is gone for a second."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tests.transfer.client.servers import LIMIT_S, memory, serving
from tests.transfer.remote.far_client import LONG
from tests.transfer.tables import one_task

HERE, THERE = (f"10.203.{os.getpid() % 256}.{host}" for host in (1, 2))
RATE = ["rate", "10mbit", "burst", "32kbit", "latency", "400ms"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=LIMIT_S)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace, joined to this one by a slow pair of interfaces: NAME-a here, NAME-b there."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("a network namespace needs root, and the programs ip and tc")
    name = f"tr{os.getpid()}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", f"{name}-a", "type", "veth", "peer", "name", f"{name}-b", "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", f"{name}-a")
        ip("link", "set", f"{name}-a", "up")
        inside = ["ip", "netns", "exec", name]
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", f"{name}-b")
        ip("-n", name, "link", "set", f"{name}-b", "up")
        for where in ([], inside):
            interface = f"{name}-b" if where else f"{name}-a"
            command = [*where, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *RATE]
            subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
        yield name
    finally:  # else the link goes some time after the namespace, and the next test uses its names
        subprocess.run(["ip", "link", "del", f"{name}-a"], check=False, capture_output=True, timeout=LIMIT_S)
        ip("netns", "del", name)


def test_rows_pass_over_a_slow_link_that_is_gone_for_a_second(namespace: str, tmp_path: Path) -> None:
    groups = 12
    listen = (f"tcp://{HERE}:*",)
    with serving(tmp_path, make=memory, tasks=one_task(FirstIn(1)), endpoints=listen, unit_limit_s=60.0) as served:
        command = [sys.executable, "-m", "tests.transfer.remote.far_client", served.address.endpoints[0], str(groups)]
        with subprocess.Popen(["ip", "netns", "exec", namespace, *command], stdout=subprocess.PIPE, text=True) as far:
            assert far.stdout is not None
            lines = [far.stdout.readline() for _ in range(3)]
            ip("link", "set", f"{namespace}-a", "down")
            Event().wait(1.0)
            ip("link", "set", f"{namespace}-a", "up")
            rest, _ = far.communicate(timeout=LIMIT_S)
            assert far.returncode == 0
        assert [line.split() for line in (*lines, *rest.splitlines())] == [[str(n), str(LONG)] for n in range(groups)]
        with SyncQueue(served.address, name="near") as queue:
            stats = queue.stats()
        assert (stats.rows, stats.tasks["only"].consumed, stats.tasks["only"].expired) == (0, groups, 0)
