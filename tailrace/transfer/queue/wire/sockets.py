"""ZeroMQ sockets as the queue uses them, and where they listen."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import zmq

from tailrace.errors import WireError
from tailrace.transfer.queue.wire.frames import MAX_FRAME_BYTES, Buffer

DEFAULT_ENDPOINTS = ("ipc://*", "tcp://127.0.0.1:*")
"""A socket in a new directory that only this user may enter, and a free port of this machine alone."""

_HIGH_WATER = 100_000
"""Messages on their way to or from one peer; those beyond are dropped by a server and sent again by the client."""
_LINGER_MS = 1000
"""What a socket may still wait for its last messages to leave when it is closed."""
_HEARTBEAT_MS, _HEARTBEAT_LIMIT_MS = 5_000, 30_000
"""Of connections: a host that vanished is noticed, and the connection made anew."""


def dealer(context: "zmq.Context[Any]", endpoint: str) -> zmq.SyncSocket:
    """The socket of a client; it connects in the background, again and again.

    Raises:
        WireError: that is no endpoint.
    """
    socket = _tuned(context.socket(zmq.DEALER))
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise WireError(
            f"cannot connect to {endpoint!r}: {error.strerror}; expected ipc://PATH or tcp://HOST:PORT"
        ) from None
    return socket


def router(context: "zmq.Context[Any]", endpoints: Sequence[str]) -> tuple[zmq.SyncSocket, list[str]]:
    """The socket of a server, and where it listens, the `*` of `endpoints` filled in.

    Raises:
        WireError: it cannot listen at one of them.
    """
    socket = _tuned(context.socket(zmq.ROUTER))
    bound: list[str] = []
    for endpoint in endpoints:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise WireError(
                f"cannot listen at {endpoint!r}: {error.strerror}; expected ipc://PATH or tcp://HOST:PORT that is free"
            ) from None
        bound.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return socket, bound


def receive(socket: zmq.SyncSocket, copied: int) -> tuple[list[bytes], list[memoryview]] | None:
    """The next message, or None where there is none: its first frames as bytes, the others as views without a copy.

    Fewer than `copied` frames come back where the message has no more.
    """
    try:
        head = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    tail: list[memoryview] = []
    while socket.getsockopt(zmq.RCVMORE):  # a message is there as a whole
        if len(head) < copied:
            head.append(socket.recv())
        else:
            tail.append(socket.recv(copy=False).buffer)
    return head, tail


def readable(socket: zmq.SyncSocket) -> bool:
    """Whether a message is there."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def send(socket: zmq.SyncSocket, frames: Sequence[Buffer]) -> None:
    """Send without waiting; long frames without a copy, so they must not change. What finds no room is dropped."""
    more = zmq.NOBLOCK | zmq.SNDMORE
    try:
        for frame in frames[:-1]:
            socket.send(frame, more, copy=False)
        socket.send(frames[-1], zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return  # as if lost on the way; no message is sent in part


@cache
def host_id() -> str:
    """The same for processes that share a machine and its /dev/shm, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shared = os.stat("/dev/shm")
    return f"{boot.read_text().strip()}-{shared.st_dev}-{shared.st_ino}"


def _tuned(socket: zmq.SyncSocket) -> zmq.SyncSocket:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_LIMIT_MS)
    return socket
