"""This process's connection to Ray: to a running cluster, or to a Ray that is started for it on this machine.

A client that Ray accepts at its ports can run code as Ray's user. So a Ray that is started here listens on this machine
alone, and accepts only clients with its token.
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
"""The first release of Ray whose processes ask each other for a token."""
_STORE_BYTES = 80 * 2**20
"""The bytes of a local Ray's object store, the least that Ray accepts: nothing large goes through Ray."""
_REACH_LIMIT_S = 5.0
"""Seconds for a cluster to answer at all."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of a client of HTTP/2, and so of gRPC (RFC 9113, section 3.4): its preface and empty settings."""
_FRAME_BYTES, _SETTINGS = 9, 4
"""The length of a frame's header, and the type of a settings frame, which is the header's fourth byte. A server's first
frame has its settings."""
_QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect(address: str | None, directory: Path | None) -> None:
    """Join the cluster at `address`, or start a Ray with its files in `directory` if `address` is None.

    A Ray that is started needs the environment of `ray_environment`.

    Raises:
        ConfigError: the cluster cannot be joined, or this release of Ray has no tokens.
        ClusterError: Ray cannot be started here.
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
    """Check that this release of Ray asks for a token.

    Raises:
        ConfigError: it is older, so that anybody who reaches its ports may run code.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _FIRST_WITH_TOKENS:
        first = ".".join(map(str, _FIRST_WITH_TOKENS))
        raise ConfigError(
            f"Ray {version} is installed, which lets in whoever reaches its ports, and runs their code; "
            f"{first} and later ask for a token: pip install 'ray>={first}'"
        )


def _start(directory: Path) -> None:
    """Start Ray. A second try may be needed: Ray gives its processes 30 s, and a busy machine may take longer."""
    options: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "_temp_dir": str(directory),
    }
    for is_last in (False, True):
        try:
            ray.init("local", **options, **_QUIET)  # "local" ignores RAY_ADDRESS: a run joins cluster.address
            return
        except Exception as error:  # Ray's errors here have no narrower type
            ray.shutdown()
            if is_last:
                raise ClusterError(
                    f"Ray did not start on this machine, twice: {one_line(error)}; see that it has memory and CPUs "
                    "to spare, or join a Ray that runs with cluster.address"
                ) from error


def check_connected_to(address: str) -> None:
    """Check that this process is connected to the Ray at `address`.

    Raises:
        ConfigError: it is connected to another one.
    """
    connected: str = ray.get_runtime_context().gcs_address
    if address not in ("auto", connected):
        raise ConfigError(
            f"cluster.address is {address!r}, and this process is connected to the Ray at {connected} already; leave "
            "cluster.address out to use that, or call ray.shutdown() before"
        )


def _check_reachable(address: str) -> None:
    """Check that a Ray cluster listens at `address`. Ray itself would take a minute to fail.

    Raises:
        ConfigError: the address cannot be reached, or is not Ray's.
    """
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
    """Whether the other end may be gRPC. The connection's timeout limits each part of the answer."""
    try:
        connection.sendall(_HELLO)
        header = connection.recv(_FRAME_BYTES, socket.MSG_WAITALL)
    except OSError:  # the other end has hung up, or is silent
        return False
    return len(header) == _FRAME_BYTES and header[3] == _SETTINGS
