"""Two hosts: two network namespaces of this machine, joined by a virtual cable. Needs root, and `ip`."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_LIMIT_S = 60.0
HEAD, NODE = "10.213.77.1", "10.213.77.2"


def _available() -> bool:
    """Whether namespaces can be made here. True for root in CI, so that a test fails there rather than is skipped."""
    if os.geteuid() != 0:
        return False
    if os.environ.get("CI"):
        return True
    if shutil.which("ip") is None:
        return False
    name = f"tailrace-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=_LIMIT_S).returncode == 0
    if made:
        _ip("netns", "delete", name)
    return made


@dataclass(frozen=True, kw_only=True)
class TwoHosts:
    """Two network namespaces, and a Ray cluster across them."""

    head: str
    node: str
    environment: dict[str, str]
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def command(self, name: str, *words: str, own_memory: bool = False) -> list[str]:
        """The command that runs `words` in the namespace `name`; `own_memory`: with its own /dev/shm, as a host has."""
        memory = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh") if own_memory else ()
        return ["ip", "netns", "exec", name, *memory, *words]

    def start_ray(self, name: str, *options: str, own_memory: bool = False) -> None:
        """Start a Ray node in the namespace `name`. It runs until `stop`."""
        ray = str(Path(sys.executable).with_name("ray"))
        common = ("--block", "--num-cpus", "1", "--object-store-memory", str(80 * 2**20), "--disable-usage-stats")
        process = subprocess.Popen(
            self.command(name, ray, "start", *common, *options, own_memory=own_memory),
            env=os.environ | self.environment | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if b"Ray runtime started" in line:
                return
        raise AssertionError(b"".join(said).decode())

    def stop(self) -> None:
        """End the Ray nodes, the head last."""
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_LIMIT_S)
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two namespaces with nothing running in them."""
    mark = secrets.token_hex(2)
    hosts = {f"tr-{mark}-a": HEAD, f"tr-{mark}-b": NODE}
    head, node = hosts
    directory = tempfile.mkdtemp(dir="/tmp")
    environment = {"TMPDIR": directory, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # the tests' own Ray sets it otherwise
    made = TwoHosts(head=head, node=node, environment=environment)
    try:
        for name in hosts:
            _ip("netns", "add", name)
        _ip("link", "add", head, "netns", head, "type", "veth", "peer", "name", node, "netns", node)
        for name, address in hosts.items():
            _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        made.stop()
        for name in hosts:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_LIMIT_S)
        shutil.rmtree(directory, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_LIMIT_S)


needs_two_hosts = pytest.mark.skipif(not _available(), reason="network namespaces need root and `ip`")
