"""This process's connection to Ray: to a cluster that runs, or to a Ray that is started for it on this machine.

Whoever reaches the ports of a Ray and is let in runs code as its user. So a Ray that is started here listens on this
machine alone, and lets in who has its token.
"""

import logging
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from tailrace.errors import ClusterError, ConfigError, one_line

_FIRST_WITH_TOKENS = (2, 52)
"""Ray's release whose processes ask each other for a token."""
_STORE_BYTES = 80 * 2**20
"""Of a local Ray's object store, the least that it takes: nothing large goes through Ray."""
_REACH_LIMIT_S = 5.0
"""For a cluster to answer at all."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2, and so of gRPC, says first (RFC 9113, section 3.4): its preface and empty settings."""
_FRAME_BYTES, _SETTINGS = 9, 4
"""The header of a frame, whose fourth byte is its type. A server's first frame is its settings."""
_QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect(address: str | None, directory: Path | None) -> None:
    """Join the cluster at `address`, or start a Ray with its files in `directory`, and the environment that
    `ray_environment` gives.

    Raises:
        ConfigError: the cluster cannot be joined, or this Ray has no tokens.
        ClusterError: no Ray can be started here.
    """
    check_version(ray.__version__)
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address is None:
        assert directory is not None
        _start(directory)
        return
    _check_reachable(address)
    try:
        ray.init(address, **_QUIET)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.address {address!r} cannot be joined: {one_line(error)}; leave it out to start a Ray for the run"
        ) from error


def check_version(version: str) -> None:
    """Raises ConfigError where Ray is so old that whoever reaches its ports may run code."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _FIRST_WITH_TOKENS:
        first = ".".join(map(str, _FIRST_WITH_TOKENS))
        raise ConfigError(
            f"Ray {version} is installed, which lets in whoever reaches its ports, and runs their code; "
            f"{first} and later ask for a token: pip install 'ray>={first}'"
        )


def _start(directory: Path) -> None:
    """Twice, where it must be: Ray gives its processes 30 s, which a machine at work may exceed."""
    options: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "_temp_dir": str(directory),
    }
    for is_last in (False, True):
        try:
            ray.init("local", **options, **_QUIET)  # "local": RAY_ADDRESS is for those who ask for it
            return
        except Exception as error:  # what Ray raises then has no narrower type
            ray.shutdown()
            if is_last:
                raise ClusterError(
                    f"Ray did not start on this machine, twice: {one_line(error)}; see that it has memory and CPUs "
                    "to spare, or join a Ray that runs with cluster.address"
                ) from error


def check_connected_to(address: str) -> None:
    """Whether the Ray that this process is connected to is the one at `address`.

    Raises:
        ConfigError: it is another one.
    """
    connected: str = ray.get_runtime_context().gcs_address
    if address not in ("auto", connected):
        raise ConfigError(
            f"cluster.address is {address!r}, and this process is connected to the Ray at {connected} already; leave "
            "cluster.address out to use that, or call ray.shutdown() before"
        )


def _check_reachable(address: str) -> None:
    """Ray itself takes a minute to say that nobody is there, or somebody else."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address {address!r} must be host:port of a running Ray cluster, or `auto`")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACH_LIMIT_S) as connection:
            is_ray = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(connection)
    except OSError as error:
        raise ConfigError(
            f"cluster.address {address!r} cannot be reached: {error}; start Ray there with `ray start --head`, or "
            "leave it out to start a Ray for the run"
        ) from None
    if not is_ray:
        raise ConfigError(
            f"cluster.address {address!r} is not Ray's: who listens there answers otherwise; give the address that "
            "`ray start --head` has printed, its port 6379 by default"
        )


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether gRPC may be at the other end, within the connection's limit for each part of the answer."""
    try:
        connection.sendall(_HELLO)
        header = connection.recv(_FRAME_BYTES, socket.MSG_WAITALL)
    except OSError:  # it has hung up, or is silent
        return False
    return len(header) == _FRAME_BYTES and header[3] == _SETTINGS
