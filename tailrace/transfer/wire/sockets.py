"""ZeroMQ sockets of clients and servers, and the endpoints of servers."""

import os
import platform
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import zmq

from tailrace.errors import WireError
from tailrace.transfer.wire.frames import CUT, PIECE_BYTES, Buffer, joined
from tailrace.transfer.wire.porter import Password, Porter

DEFAULT_ENDPOINTS = ("ipc://*", "tcp://127.0.0.1:*")
"""A socket in a new directory that only this user may enter, and a free local port that only this machine reaches."""

SERVER_ID_BYTES = 8
_AT_SERVER = re.compile(rf"#([0-9a-f]{{{2 * SERVER_ID_BYTES}}})$")
"""The end of an endpoint that one server alone has."""

_MAX_PARENT_BYTES = 63
"""Length limit of the path to a directory of sockets: a socket's path may have 103 bytes on macOS, 107 on Linux."""
_SHORT_PARENT = Path("/tmp")
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_HIGH_WATER = 100_000
"""The most messages on their way to or from one peer. A server drops those beyond; the client sends them again."""
_LINGER_MS = 1000
"""The time that a closed socket may wait for its last messages to leave."""
_HEARTBEAT_MS, _HEARTBEAT_LIMIT_MS = 5_000, 30_000
"""Heartbeats of connections: they show a host that has vanished, and ZeroMQ reconnects."""


def private_directory(prefix: str, *, max_parent_bytes: int = _MAX_PARENT_BYTES) -> Path:
    """Make a directory for sockets, which only this user may enter, in `socket_parent`.

    Raises:
        WireError: the directory cannot be made.
    """
    parent = socket_parent(max_parent_bytes)
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise WireError(
            f"no directory for sockets can be made in {parent}: {error.strerror}; set TMPDIR to a directory that this "
            f"user can write to, with a path of at most {max_parent_bytes} bytes"
        ) from None


def socket_parent(max_bytes: int = _MAX_PARENT_BYTES) -> Path:
    """The parent of directories of sockets: that of temporary files, or /tmp if its path has over `max_bytes`."""
    parent = tempfile.gettempdir()
    try:
        fits = len(parent.encode()) <= max_bytes
    except UnicodeEncodeError:  # its bytes are no text, which endpoints must be
        fits = False
    return Path(parent) if fits else _SHORT_PARENT


def at_this_server(endpoint: str, server: str) -> str:
    """An endpoint that means one server alone, by its id. Another server that listens there later counts as nobody."""
    return f"{endpoint}#{server}"


def server_at(endpoint: str) -> str | None:
    """The id of the only server that an endpoint means; None if it means any that listens there."""
    match = _AT_SERVER.search(endpoint)
    return None if match is None else match[1]


def _address(endpoint: str) -> str:
    return _AT_SERVER.sub("", endpoint)


def dealer(context: "zmq.Context[Any]", password: Password) -> zmq.SyncSocket:
    """Make the socket of a client, which is not connected yet."""
    socket = _tuned(context.socket(zmq.DEALER))
    socket.setsockopt(zmq.PLAIN_USERNAME, password.name)
    socket.setsockopt(zmq.PLAIN_PASSWORD, password.word)
    return socket


def connect(socket: zmq.SyncSocket, endpoint: str) -> None:
    """Connect in the background, again and again.

    Raises:
        WireError: `endpoint` is invalid.
    """
    try:
        socket.connect(_address(endpoint))
    except zmq.ZMQError as error:
        raise WireError(
            f"cannot connect to {endpoint!r}: {error.strerror}; expected ipc://PATH or tcp://HOST:PORT"
        ) from None


def disconnect(socket: zmq.SyncSocket, endpoint: str) -> None:
    """Undo `connect`."""
    socket.disconnect(_address(endpoint))


class Listener:
    """The socket of a server."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoints: Sequence[str],
        token: bytes,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Listen at `endpoints`; `ipc://*` is a socket in a new directory that only this user may enter.

        `token`: a client that does not know it gets no message through. `on_failure`: see `Porter`. A context has one
        listener.

        Raises:
            WireError: it cannot listen at one of them.
        """
        self.socket = _tuned(context.socket(zmq.ROUTER))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that `send` tells whether the peer is there
        self._porter = Porter(context, self.socket, token, on_failure)
        self.endpoints: list[str] = []
        """The endpoints, with each `*` filled in."""
        self._directories: list[Path] = []
        for endpoint in endpoints:
            try:
                self.socket.bind(self._private() if endpoint == "ipc://*" else endpoint)
            except zmq.ZMQError as error:
                self.close()
                raise WireError(
                    f"cannot listen at {endpoint!r}: {error.strerror}; "
                    f"expected ipc://PATH or tcp://HOST:PORT that is free"
                ) from None
            self.endpoints.append(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def receive(self) -> tuple[int, list[bytes], list[memoryview]] | None:
        """Receive a message: the connection's descriptor, then its name and the header, and the rest; see `receive`."""
        if not readable(self.socket):
            return None
        try:
            name = self.socket.recv(_NOW, copy=False)
        except zmq.Again:
            return None
        head, tail = _rest(self.socket, name, copied=2)
        return int(name.get(zmq.SRCFD)), head, tail

    def know(self, connection: int) -> None:
        """See `Porter.know`."""
        self._porter.know(connection)

    def close(self) -> None:
        """Hang up. The last messages may take a second to leave."""
        self._porter.close()
        self.socket.close()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)  # ZeroMQ removes its socket a moment later or sooner

    def _private(self) -> str:
        self._directories.append(private_directory("tailrace-"))
        return f"ipc://{self._directories[-1]}/socket"


def receive(socket: zmq.SyncSocket, copied: int) -> tuple[list[bytes], list[memoryview]] | None:
    """Receive a message, if there is one: its first frames as bytes, the others as views without a copy.

    Fewer than `copied` frames come back if the message has no more. A message that was cut is put together. If that
    fails, its header is empty.
    """
    if not readable(socket):  # faster than the exception of a recv
        return None
    try:
        first = socket.recv(_NOW, copy=False)
    except zmq.Again:
        return None
    return _rest(socket, first, copied=copied)


def _rest(socket: zmq.SyncSocket, frame: zmq.Frame, *, copied: int) -> tuple[list[bytes], list[memoryview]]:
    """Return all frames of the message that begins with `frame`."""
    head: list[bytes] = [frame.bytes]
    tail: list[memoryview] = []
    while frame.more:  # known without a call to ZeroMQ, and a message is there as a whole
        frame = socket.recv(copy=False)
        if len(head) < copied:
            head.append(frame.bytes)
        else:
            tail.append(frame.buffer)
    if head[-1].startswith(CUT) and len(head) == copied:
        try:
            head[-1], tail = joined(head[-1], tail)
        except WireError:
            head[-1] = b""
    return head, tail


def readable(socket: zmq.SyncSocket) -> bool:
    """Whether a message can be received."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def send(socket: zmq.SyncSocket, frames: Sequence[Buffer]) -> bool:
    """Send without waiting. Long frames are not copied, so they must not change. A message without room is dropped.

    Return False if a server sends to a connection that is gone.
    """
    try:
        for frame in frames[:-1]:
            socket.send(frame, _NOW_AND_MORE, copy=False)
        socket.send(frames[-1], _NOW, copy=False)
    except zmq.Again:
        return True  # as if lost on the way; no message is sent in part
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


@cache
def host_id() -> str:
    """An id that is equal only for processes that share a machine and its /dev/shm, if it has one."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        machine = f"{platform.node()}-{uuid.getnode():x}"
    try:
        shared = os.stat("/dev/shm")
    except OSError:
        return machine
    return f"{machine}-{shared.st_dev}-{shared.st_ino}"


def reachable(endpoints: Sequence[str], host: str) -> list[str]:
    """The endpoints of a server on `host` that this process may reach, the best one first.

    The best is ipc if its path exists here: a container may share the machine's /dev/shm, but not the files of others.
    """
    local = host == host_id()
    return sorted((endpoint for endpoint in endpoints if local or not endpoint.startswith("ipc:")), key=_detour)


def _detour(endpoint: str) -> int:
    if not endpoint.startswith("ipc:"):
        return 1
    return 0 if os.path.exists(_address(endpoint).removeprefix("ipc://")) else 2


def _tuned(socket: zmq.SyncSocket) -> zmq.SyncSocket:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_LIMIT_MS)
    return socket
